"""Two servers on this machine, one that reads and one that writes, behind what routers send them."""

import http.client
import importlib.util
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.live import Answer, Live, total
from tests.server.reach.proxies import PROXIES, Proxy, sglang

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")),
    reason="NIXL (nixl_cu12 or nixl_cu13) is not installed",
)

SECRET = {"SPECDEC_REACH_SECRET": "a secret of the tests".replace(" ", "-"), "UCX_NET_DEVICES": "lo"}
EXACT = ("--dtype", "float64", "--memory-bytes", "256MiB")
TEXT = "".join(f"class Parser{i}:\n    def parse(self, text):\n        return text\n" for i in range(8))
ROOMS = itertools.count(7 << 40)
WAIT_S = 30.0


@pytest.fixture(scope="module")
def alone() -> Iterator[Live]:
    with Live(*EXACT) as live:
        yield live


@pytest.fixture(scope="module")
def reads() -> Iterator[Live]:
    with Live(*EXACT, "--role", "prefill", "--reach-port", "0", env=SECRET) as live:
        yield live


@pytest.fixture(scope="module")
def port(reads: Live) -> int:
    return int(reads.ask("/server_info").json["disaggregation_bootstrap_port"])


@pytest.fixture(scope="module")
def writes(port: int) -> Iterator[Live]:
    peers = ("--reach-port", "0", "--reach-peers", f"127.0.0.1:{port}")
    with Live(*EXACT, "--role", "decode", *peers, env=SECRET) as live:
        yield live


def completion(text: str, **own: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "max_tokens": 24, "ignore_eos": True, **own}


def chat(text: str, **own: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
        "ignore_eos": True,
        **own,
    }


KINDS = (completion, chat)
DRAWN = {"temperature": 0.8, "seed": 7}


def texts(answer: Answer) -> list[str]:
    """Return what each choice says, whole or streamed."""
    assert answer.status == 200, answer.data
    streamed = answer.headers["Content-Type"].startswith("text/event-stream")
    said: dict[int, str] = {}
    for part in answer.events if streamed else [answer.json]:
        for choice in part["choices"]:
            told = choice.get("message") or choice.get("delta") or choice
            text = told.get("text") or told.get("content") or ""
            said[choice["index"]] = said.get(choice["index"], "") + text
    return [said[index] for index in sorted(said)]


def relay(proxy: Proxy, reads: Live, writes: Live, path: str, body: dict[str, Any]) -> Answer:
    """Ask one server and then the other, as this router does."""
    first = reads.ask(path, proxy.to_prefill(body))
    assert first.status == 200, first.data
    choices = first.json["choices"]
    assert all(choice["finish_reason"] == "length" for choice in choices) and not any(texts(first))
    assert first.json["usage"]["completion_tokens"] == 0
    return writes.ask(path, proxy.to_decode(body, first.json))


def meet(reads: Live, writes: Live, port: int, path: str, body: dict[str, Any]) -> tuple[Answer, Answer]:
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
    """Wait until a figure is zero."""
    until_s = time.monotonic() + WAIT_S
    while total(live.metrics(), name):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("proxy", PROXIES, ids=lambda own: own.name)
def test_two_servers_say_what_one_says(
    alone: Live, reads: Live, writes: Live, kind: Any, proxy: Proxy
) -> None:
    for index, own in enumerate(({"temperature": 0}, DRAWN, {**DRAWN, "n": 2}, {**DRAWN, "stream": True})):
        path, body = kind(f"# {proxy.name} {kind.__name__} {index}\n{TEXT}", **own)
        before = fetched(writes)
        answer = relay(proxy, reads, writes, path, body)
        assert texts(answer) == texts(alone.ask(path, body))
        assert fetched(writes) == before + 1
        if not own.get("stream"):
            usage = answer.json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert settles(reads, "specdec:reach_leases")


@pytest.mark.parametrize("kind", KINDS)
def test_servers_that_are_asked_at_once_say_what_one_says(
    alone: Live, reads: Live, writes: Live, port: int, kind: Any
) -> None:
    for index, own in enumerate(({"temperature": 0}, {**DRAWN, "n": 2}, {**DRAWN, "stream": True})):
        path, body = kind(f"# at once {kind.__name__} {index}\n{TEXT}", **own)
        before = fetched(writes)
        first, answer = meet(reads, writes, port, path, body)
        assert not any(texts(first))
        assert texts(answer) == texts(alone.ask(path, body))
        assert fetched(writes) == before + 1
    assert settles(reads, "specdec:reach_leases")


def test_each_of_several_prompts_is_fetched(alone: Live, reads: Live, writes: Live, port: int) -> None:
    prompts = [f"# prompt {index}\n{TEXT}" for index in range(3)]
    path, body = completion("", **DRAWN)
    body |= {"prompt": [*prompts, "x"], "n": 2}
    expected, before = texts(alone.ask(path, body)), fetched(writes)
    assert texts(relay(PROXIES[0], reads, writes, path, body)) == expected
    assert fetched(writes) == before + 3
    body["prompt"] = [f"# again\n{prompt}" for prompt in prompts]
    expected, before = texts(alone.ask(path, body)), fetched(writes)
    rooms = [next(ROOMS) for _ in prompts]
    sent = body | {"bootstrap_host": ["127.0.0.1"] * 3, "bootstrap_port": [port] * 3, "bootstrap_room": rooms}
    _, answer = together(reads, writes, path, sent)
    assert texts(answer) == expected and fetched(writes) == before + 3


def test_what_is_scored_is_read_where_it_is_answered(alone: Live, reads: Live, writes: Live) -> None:
    for own in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
        path, body = completion(f"# scored {own}\n{TEXT}", temperature=0, **own)
        before = fetched(writes)
        found = relay(PROXIES[0], reads, writes, path, body).json["choices"]
        assert found == alone.ask(path, body).json["choices"]
        assert fetched(writes) == before


def forged(params: dict[str, Any], case: str) -> dict[str, Any]:
    lease = params["specdec"]["leases"][0]
    match case:
        case "mac":
            return params | {"specdec": params["specdec"] | {"leases": [lease | {"mac": "0" * 64}]}}
        case "engine":
            return params | {"remote_engine_id": "0" * 32}
        case "lease":
            return params | {"specdec": params["specdec"] | {"leases": [lease | {"lease": "0" * 32}]}}
        case "host":
            return params | {"remote_host": "203.0.113.1"}
        case "port":
            return params | {"remote_port": 1}
        case "none":
            return {"do_remote_prefill": True}
        case _:
            return params | {"specdec": params["specdec"] | {"leases": []}}


@pytest.mark.parametrize("case", ["mac", "engine", "lease", "host", "port", "none", "leases"])
def test_what_was_not_signed_for_this_prompt_is_read_here(
    alone: Live, reads: Live, writes: Live, case: str
) -> None:
    path, body = completion(f"# forged {case}\n{TEXT}", temperature=0)
    params = reads.ask(path, PROXIES[0].to_prefill(body)).json["kv_transfer_params"]
    before = fetched(writes)
    answer = writes.ask(path, body | {"kv_transfer_params": forged(params, case)})
    assert texts(answer) == texts(alone.ask(path, body)) and fetched(writes) == before


@pytest.mark.parametrize("change", [{"prompt": f"# another\n{TEXT}"}, {"cache_salt": "another"}])
def test_leases_are_for_one_prompt_and_salt(
    alone: Live, reads: Live, writes: Live, change: dict[str, Any]
) -> None:
    path, body = completion(f"# changed {list(change)}\n{TEXT}", temperature=0, cache_salt="one")
    params = reads.ask(path, PROXIES[0].to_prefill(body)).json["kv_transfer_params"]
    before, other = fetched(writes), body | change
    answer = writes.ask(path, other | {"kv_transfer_params": params})
    assert texts(answer) == texts(alone.ask(path, other)) and fetched(writes) == before
    assert writes.ask(path, body | {"kv_transfer_params": params}).status == 200
    assert fetched(writes) == before + 1, "the control: what was signed can be fetched"


def test_a_room_serves_one_request(reads: Live, writes: Live, port: int) -> None:
    path, body = completion(f"# a room\n{TEXT}", temperature=0)
    sent = sglang(body, "127.0.0.1", port, next(ROOMS))
    assert [own.status for own in together(reads, writes, path, sent)] == [200, 200]
    again = reads.ask(path, sent)
    assert again.status == 409 and again.error["param"] == "bootstrap_room"


def test_a_room_that_failed_is_read_here_at_once(alone: Live, reads: Live, writes: Live, port: int) -> None:
    """The server that reads has refused the request, before the other asks for it or while it waits."""
    path, body = completion(f"# failed\n{TEXT}", temperature=0)
    room = next(ROOMS)
    refused = reads.ask(path, sglang(body | {"prompt": [70_000_000]}, "127.0.0.1", port, room))
    assert refused.status == 400
    answer = writes.ask(path, sglang(body, "127.0.0.1", port, room))
    assert texts(answer) == texts(alone.ask(path, body))
    assert fetched(writes, "prefill_failed"), "it has not waited for a room that never comes"


def begin(live: Live, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request, and leave its answer for whoever closes the connection."""
    parts = urlsplit(live.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.sock


def comes(live: Live, name: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not total(live.metrics(), name):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_clients_that_leave_take_what_was_held_along(reads: Live, writes: Live, port: int) -> None:
    path, body = completion(f"# left\n{TEXT}", temperature=0)
    sock = begin(writes, path, sglang(body, "127.0.0.1", port, next(ROOMS)))
    comes(writes, "specdec:reach_holds")
    sock.close()
    assert settles(writes, "specdec:reach_holds") and settles(writes, "vllm:num_requests_running")
    for index in range(6):
        path, body = completion(f"# left {index}\n{TEXT * 6}", temperature=0)
        sock = begin(reads, path, sglang(body, "127.0.0.1", port, next(ROOMS)))
        time.sleep(0.01 * index)
        sock.close()
    assert settles(reads, "vllm:num_requests_running")


def test_a_server_says_what_its_role_is(alone: Live, reads: Live, writes: Live) -> None:
    for live, role, mode in (
        (alone, None, "null"),
        (reads, "prefill", "prefill"),
        (writes, "decode", "decode"),
    ):
        told = live.ask("/server_info").json
        assert (told["role"], told["disaggregation_mode"]) == (role, mode)
        assert told["served_model_name"] == "tiny"
        assert live.ask("/model_info").json["model_path"] == "tiny"


def test_requests_that_say_nothing_of_it_are_answered_as_ever(alone: Live, reads: Live, writes: Live) -> None:
    path, body = completion("def f(x):\n", temperature=0)
    expected = texts(alone.ask(path, body))
    assert texts(reads.ask(path, body)) == texts(writes.ask(path, body)) == expected


def test_what_a_role_does_not_do_is_refused(alone: Live, reads: Live, writes: Live) -> None:
    path, body = completion("x")
    for live, params in (
        (alone, {"do_remote_decode": True}),
        (reads, {"do_remote_prefill": True}),
        (writes, {"do_remote_decode": True}),
    ):
        answer = live.ask(path, body | {"kv_transfer_params": params})
        assert answer.status == 400 and answer.error["param"] == "kv_transfer_params"
    answer = reads.ask(path, body | {"keep_alive": 5})
    assert answer.status == 400 and answer.error["param"] == "keep_alive"


def test_nothing_failed_and_memory_is_whole(reads: Live, writes: Live) -> None:
    """Runs last: prompts that were held are over, and both arenas are proved whole."""
    for live in (reads, writes):
        figures = live.metrics()
        assert not total(figures, "specdec:failed_steps_total")
        assert not total(figures, "specdec:reach_quarantined")
        assert total(figures, "specdec:clean_checks_total")
