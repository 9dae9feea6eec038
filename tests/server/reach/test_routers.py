"""sglang-router itself in front of two servers."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Live
from tests.server.reach.pairs import (
    DRAWN,
    EXACT,
    SECRET,
    TEXT,
    WAIT_S,
    chat,
    completion,
    fetched,
    free_port,
    has_nixl,
    settles,
    texts,
)

pytestmark = has_nixl
pytest.importorskip("sglang_router", reason="sglang-router is not installed")


class Router(Live):
    """sglang-router, asked as a server is."""

    def __init__(self, reads: Live, writes: Live, port: int, log: Path) -> None:
        own = free_port()
        self.url, self.log = f"http://127.0.0.1:{own}", log
        self.tls = None
        ends = ("--prefill", reads.url, str(port), "--decode", writes.url)
        self.command = [
            *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", *ends),
            *("--host", "127.0.0.1", "--port", str(own), "--disable-retries"),
        ]

    def __enter__(self) -> "Router":
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, env=os.environ, stdout=log, stderr=subprocess.STDOUT, text=True
            )
        until_s = time.monotonic() + WAIT_S
        while not self.is_ready():
            assert self.process.poll() is None and time.monotonic() < until_s, self.log.read_text()
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)

    def is_ready(self) -> bool:
        """Tell whether it knows both servers."""
        try:
            return self.ask("/readiness").status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Live, Live]]:
    with ExitStack() as stack:
        lends = ("--role", "prefill", "--reach-port", "0", "--drain-seconds", "1")
        reads = stack.enter_context(Live(*EXACT, *lends, env=SECRET))
        port = reads.ask("/server_info").json["disaggregation_bootstrap_port"]
        peers = ("--reach-port", "0", "--reach-peers", f"127.0.0.1:{port}")
        writes = stack.enter_context(Live(*EXACT, "--role", "decode", *peers, env=SECRET))
        log = tmp_path_factory.mktemp("router") / "log"
        yield reads, writes, stack.enter_context(Router(reads, writes, port, log))


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (completion, {"temperature": 0}),
        (completion, {**DRAWN, "stream": True}),
        (completion, {"temperature": 0, "logprobs": 1}),
        (chat, {"temperature": 0, "logprobs": True, "top_logprobs": 2}),
        (chat, {**DRAWN, "stream": True}),
        (chat, {**DRAWN, "n": 2}),
    ],
)
def test_sglang_router_gives_one_servers_texts(
    servers: tuple[Live, Live, Live], kind: Any, own: dict[str, Any]
) -> None:
    reads, writes, router = servers
    path, body = kind(f"# {kind.__name__} {own}\n{TEXT}", model="tiny", **own)
    before = fetched(writes)
    found = texts(router.ask(path, body))
    assert fetched(writes) == before + 1
    assert found == texts(reads.ask(path, body)), "who says nothing of rooms is answered as ever"


def test_sglang_router_hands_on_several_prompts_and_mistakes(servers: tuple[Live, Live, Live]) -> None:
    reads, writes, router = servers
    path, body = completion("", model="tiny", temperature=0)
    body["prompt"] = [f"# several {index}\n{TEXT}" for index in range(2)]
    before = fetched(writes)
    found = texts(router.ask(path, body))
    assert fetched(writes) == before + 2 and found == texts(reads.ask(path, body))
    refused = router.ask(path, body | {"temperature": -1})
    assert refused.status == 400 and b"temperature" in refused.data
    assert router.ask("/v1/models").json["data"][0]["id"] == "tiny"
    assert settles(reads, "specdec:reach_leases")
