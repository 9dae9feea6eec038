"""Helpers for tests of two servers: prompts, and requests as routers send them."""

import http.client
import importlib.util
import itertools
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.live import Answer, Live, total
from tests.server.reach.proxies import Proxy, sglang

has_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")),
    reason="NIXL (nixl_cu12 or nixl_cu13) is not installed",
)

SECRET = {"SPECDEC_REACH_SECRET": "a-secret-of-the-tests", "UCX_NET_DEVICES": "lo"}
EXACT = ("--dtype", "float64", "--memory-bytes", "256MiB")
TEXT = "".join(f"class Parser{i}:\n    def parse(self, text):\n        return text\n" for i in range(6))
ROOMS = itertools.count(7 << 40)
WAIT_S = 30.0


def completion(text: str, **own: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "max_tokens": 12, "ignore_eos": True, **own}


def chat(text: str, **own: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "ignore_eos": True,
        **own,
    }


KINDS = (completion, chat)
DRAWN = {"temperature": 0.8, "seed": 7}


def texts(answer: Answer) -> list[str]:
    """Return each choice's text, streamed or not."""
    assert answer.status == 200, answer.data
    streamed = answer.data.startswith(b"data: ")
    said: dict[int, str] = {}
    for part in answer.events if streamed else [answer.json]:
        for choice in part["choices"]:
            told = choice.get("message") or choice.get("delta") or choice
            text = told.get("text") or told.get("content") or ""
            said[choice["index"]] = said.get(choice["index"], "") + text
    return [said[index] for index in sorted(said)]


def relay(proxy: Proxy, reads: Live, writes: Live, path: str, body: dict[str, Any]) -> Answer:
    """Ask the prefill and then the decode instance, as this router does."""
    first = reads.ask(path, proxy.to_prefill(body))
    assert first.status == 200, first.data
    choices = first.json["choices"]
    assert all(choice["finish_reason"] == "length" for choice in choices) and not any(texts(first))
    assert first.json["usage"]["completion_tokens"] == 0
    return writes.ask(path, proxy.to_decode(body, first.json))


def connect(reads: Live, writes: Live, port: int, path: str, body: dict[str, Any]) -> tuple[Answer, Answer]:
    """Ask both at once, as sglang-router does."""
    sent = sglang(body, "127.0.0.1", port, next(ROOMS))
    return together(reads, writes, path, sent)


def together(reads: Live, writes: Live, path: str, sent: dict[str, Any]) -> tuple[Answer, Answer]:
    found: list[Answer] = []
    asking = threading.Thread(target=lambda: found.append(reads.ask(path, sent)))
    asking.start()
    answer = writes.ask(path, sent)
    asking.join(WAIT_S)
    return found[0], answer


def fetched(live: Live, outcome: str = "fetched") -> float:
    figures = live.metrics()
    return sum(v for k, v in figures.items() if "reach_fetches_total" in k and f'outcome="{outcome}"' in k)


def settles(live: Live, name: str) -> bool:
    """Wait until a metric is zero; return False on timeout."""
    until_s = time.monotonic() + WAIT_S
    while total(live.metrics(), name):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def begin(live: Live, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request, and return its socket without reading the answer."""
    parts = urlsplit(live.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.sock


def comes(live: Live, name: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not total(live.metrics(), name):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
