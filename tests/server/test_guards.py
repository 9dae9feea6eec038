"""Access, concurrency limits, and clients that leave or do not read."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from specdec.cli import main
from tests.selection import EXHAUSTIVE, only
from tests.server.live import Live

KEY = {"Authorization": "Bearer given"}
LONG: dict[str, Any] = {
    "prompt": "import os\n",
    "max_tokens": 900,
    "temperature": 1.0,
    "ignore_eos": True,
    "stream": True,
    "seed": 1,
}
PLAIN = ("--draft", "none")
"""These tests do not depend on drafts, and an engine without them starts at once."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("from-a-file\n\n")
    mine = ("--api-key", "given max_queued=64", "--api-key-file", str(keys))
    limits = ("--max-queued", "64", "--max-body-bytes", "20000", "--stall-timeout", "1")
    env = {"SPECDEC_API_KEY": "from-outside"}
    with Live(*PLAIN, *limits, *mine, env=env) as own:
        yield own
        assert "Traceback" not in own.stop()[1]


def wait_for(true: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.02)


def open_stream(live: Live, body: dict[str, Any], *, buffer: int | None = None) -> socket.socket:
    """Send a request over a raw socket and leave its answer unread."""
    url = urlsplit(live.url)
    assert url.hostname and url.port
    sock = socket.socket()
    if buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect((url.hostname, url.port))
    data = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: [::1]", "Content-Type: application/json"]
    head += [f"Authorization: {KEY['Authorization']}", f"Content-Length: {len(data)}"]
    sock.sendall("\r\n".join([*head, "", ""]).encode() + data)
    return sock


def running(live: Live) -> float:
    return next(v for k, v in live.metrics().items() if k.startswith("vllm:num_requests_running"))


def test_a_key_is_asked_for(live: Live) -> None:
    for key in ("given", "from-a-file", "from-outside"):
        assert live.ask("/v1/models", Authorization=f"Bearer {key}").status == 200
    for wrong in ("Bearer wrong", "Bearer", "", "given", "Basic given", "Bearer given2", "Bearer \xe9"):
        answer = live.ask("/v1/completions", LONG, Authorization=wrong)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert "given" not in answer.error["message"]
    assert live.ask("/health").status == live.ask("/metrics", **KEY).status == 200
    assert live.ask("/metrics").status == 401


def test_excess_requests_are_refused_and_others_continue(live: Live) -> None:
    streams = [open_stream(live, LONG | {"seed": i, "n": 32}) for i in range(2)]
    wait_for(lambda: running(live) == 64)
    answer = live.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}, **KEY)
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    assert answer.error["type"] == "rate_limit_error"
    assert live.ask("/v1/completions", {"prompt": "x", "n": 65}, **KEY).error["param"] == "n"
    assert live.ask("/v1/completions", {"prompt": "x" * 30_000}, **KEY).status == 413
    for stream in streams:
        stream.close()
    wait_for(lambda: running(live) == 0)
    assert live.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}, **KEY).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_ends_the_request(live: Live, stream: bool) -> None:
    ended = total_ended(live)
    sock = open_stream(live, LONG | {"n": 8, "stream": stream})
    wait_for(lambda: running(live) == 8)
    sock.close()
    wait_for(lambda: running(live) == 0)
    assert total_ended(live) == ended + 8


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n", b"\x16\x03\x01" * 9, b"GET /" * 9000])
def test_invalid_http_is_answered_and_harmless(live: Live, data: bytes) -> None:
    url = urlsplit(live.url)
    with socket.create_connection((url.hostname, url.port)) as sock:
        sock.sendall(data)
        assert sock.recv(99).startswith(b"HTTP/1.") and live.ask("/health").status == 200


def total_ended(live: Live) -> float:
    return sum(v for k, v in live.metrics().items() if k.startswith("vllm:request_success_total"))


def test_clients_that_do_not_read_are_dropped_and_delay_no_others(live: Live) -> None:
    wide = LONG | {"n": 60, "logprobs": 20, "return_token_ids": True}
    sock = open_stream(live, wide, buffer=4096)
    wait_for(lambda: running(live) == 60)
    answer = live.ask("/v1/completions", LONG | {"max_tokens": 20, "stream": False}, **KEY)
    assert answer.json["usage"]["completion_tokens"] == 20
    wait_for(lambda: running(live) == 0)
    # Its requests are no longer in flight: all slots are free.
    wait_for(
        lambda: (
            live.ask("/v1/completions", LONG | {"n": 64, "max_tokens": 1, "stream": False}, **KEY).status
            != 429
        )
    )
    sock.close()
    assert live.ask("/health").status == 200


def test_a_request_has_its_time() -> None:
    with Live(*PLAIN, "--request-timeout", "2") as live:
        answer = live.ask("/v1/completions", LONG | {"n": 64, "stream": False})
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        # Few enough for the first to arrive in time, which decides the answer.
        events = live.ask("/v1/completions", LONG | {"n": 24}).events
        assert events[-1]["error"]["code"] == "timeout"
        wait_for(lambda: running(live) == 0)


def test_on_sigterm_it_drains_and_refuses_new_requests() -> None:
    with Live(*PLAIN) as live:
        answers: list[Any] = []
        asked = threading.Thread(
            target=lambda: answers.append(live.ask("/v1/completions", LONG | {"n": 4, "max_tokens": 600}))
        )
        asked.start()
        wait_for(lambda: running(live) == 4)
        live.process.send_signal(signal.SIGTERM)
        wait_for(lambda: live.ask("/ready").status == 503)
        refused = live.ask("/v1/completions", LONG)
        assert (refused.status, refused.error["code"]) == (503, "stopping")
        asked.join()
        reasons = [c["finish_reason"] for e in answers[0].events for c in e["choices"] if c["finish_reason"]]
        assert reasons == ["length"] * 4
        code, log = live.stop()
        assert code == 0 and "Traceback" not in log
        assert log.splitlines()[-1].endswith(" INFO specdec.server.run: stopped")


@pytest.mark.parametrize("twice", only({False}, [True, False]))
def test_clients_cut_off_by_a_stop_get_an_error(twice: bool) -> None:
    with Live(*PLAIN, "--drain-seconds", "600" if twice else "0.3") as live, ThreadPoolExecutor(2) as pool:
        wide = LONG | {"n": 16}
        streamed, whole = (
            pool.submit(live.ask, "/v1/completions", wide | {"stream": stream}) for stream in (True, False)
        )
        wait_for(lambda: running(live) == 32)
        live.process.send_signal(signal.SIGTERM)
        if twice:
            wait_for(lambda: live.ask("/ready").status == 503)
            live.process.send_signal(signal.SIGTERM)
        assert streamed.result().failure["code"] == "stopping"
        answer = whole.result()
        assert (answer.status, answer.error["code"]) == (503, "stopping")
        assert live.process.wait(timeout=60) == 0 and "Traceback" not in live.stop()[1]


@pytest.mark.parametrize("twice", only({False}, [True, False]))
def test_it_stops_in_bounded_time(twice: bool) -> None:
    with Live("--drain-seconds", "600" if twice else "0.3", is_fresh=True) as live:
        sock = open_stream(live, LONG | {"n": 64})
        wait_for(lambda: running(live) == 64)
        live.process.send_signal(signal.SIGINT)
        if twice:
            wait_for(lambda: live.ask("/ready").status == 503)
            live.process.send_signal(signal.SIGINT)
        assert live.process.wait(timeout=60) == 0 and "Traceback" not in live.stop()[1]
        sock.close()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--port", "70000"), "--port"),
        (("--host", "no.such.host.invalid"), "--host"),
        (("--host", "192.0.2.1"), "--host: 192.0.2.1 is not an address of this machine"),
        (("--api-key-file", "/nowhere"), "--api-key-file"),
        (("--max-queued", "0"), "--max-queued"),
        (("--draft", "none", "--topk", "2"), "--topk"),
    ],
)
def test_settings_that_do_not_fit_are_named_in_one_line(
    options: tuple[str, ...], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "tiny", *options]) == 2
    said = capsys.readouterr().err
    assert field in said and said.count("\n") == 1


TAKEN = """
import sys
from specdec.cli import main
print(main(["serve", *sys.argv[1:]]), "torch" in sys.modules)
"""


def test_a_port_in_use_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = [str(tmp_path), "--port", str(taken.getsockname()[1])]
        ran = subprocess.run([sys.executable, "-c", TAKEN, *argv], capture_output=True, text=True)
    assert ran.stdout == "2 False\n" and "is in use at 127.0.0.1" in ran.stderr, ran.stderr


def test_a_client_that_hangs_up_leaves_a_line_with_its_time() -> None:
    with Live(*PLAIN) as live:
        sock = open_stream(live, LONG | {"n": 2, "stream": False})  # only a write could reveal it earlier
        wait_for(lambda: running(live) == 2)
        sock.close()
        wait_for(lambda: running(live) == 0)
        said = live.stop()[1]
    assert re.search(
        r"^\d{4}-\d\d-\d\d \S+ INFO \S+ \w+ /v1/completions: client disconnected", said, re.MULTILINE
    )


@EXHAUSTIVE
def test_prompts_are_logged_only_on_request() -> None:
    for options in ((), ("--log-prompts",)):
        with Live(*PLAIN, *options) as live:
            live.ask("/v1/completions", {"prompt": "a secret", "max_tokens": 1})
            live.ask("/v1/completions", {"prompt": "x", "stop": ["another secret"], "min_p": 2})
            live.ask("/v1/completions", data=b"{")
            live.ask("/v1/completions", {"prompt": "x", "keep_alive": "a secret\n"})
            live.ask("/%0aCRITICAL%1b")
            said = live.stop()[1]
        assert ("a secret" in said) == bool(options)
        assert "; param min_p" in said and "; code invalid_json" in said
        told = re.search(r" 400 in \d+ ms; param keep_alive(.*)", said)
        assert told and told[1].startswith("; reason ") == bool(options)
        assert "\nCRITICAL" not in said and "\x1b" not in said
