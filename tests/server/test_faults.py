"""A server that is attacked or breaks: its other clients' answers, and its resources afterwards."""

import contextlib
import http.client
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.selection import EXHAUSTIVE
from tests.server.faulty import FILE, PATIENCE_S, PLACES
from tests.server.live import Answer, Live
from tests.server.load import settle
from tests.server.test_guards import running, wait_for

ALONE: dict[str, Any] = {"prompt": "def f(x):\n", "max_tokens": 40, "temperature": 0.8, "seed": 5}
LONG: dict[str, Any] = {
    "prompt": "abab",
    "max_tokens": 450,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
DRAFTS = ("--draft", "suffix", "--no-adaptive", "--num-steps", "3", "--topk", "2", "--num-draft-tokens", "6")
EXACT = ("--dtype", "float64", "--max-running", "16")
PLAIN_TEXT = ("--draft", "none", "--max-model-len", "512")
TIMES = ("--body-timeout", "1", "--idle-timeout", "3", "--stall-timeout", "1")
ROWS, SILENT = 4, 10_000
MB_MORE = 64.0
"""Allowed memory growth: torch's buffers and Python's heap keep their sizes."""


class Told:
    """Inject faults into a server of `tests.server.faulty`."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "fault"
        self.env = {FILE: str(self.file)}

    def fail(self, place: str) -> None:
        """Name the place, and wait until a step has failed there."""
        new = self.file.with_suffix(".new")
        new.write_text(place)
        new.rename(self.file)
        wait_for(lambda: not self.file.exists())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("told"))


@pytest.fixture(scope="module")
def live(hybrid: Path, told: Told) -> Iterator[Live]:
    with Live(*DRAFTS, *EXACT, *TIMES, model=str(hybrid), env=told.env, entry="tests.server.faulty") as own:
        yield own
        failed = own.ask("/server_info").json["failed_steps"]
        code, log = own.stop()
        assert code == 0 and log.count("a step failed") == failed


@pytest.fixture(scope="module")
def text(live: Live) -> str:
    """Return an undisturbed server's answer to a request."""
    return said(live)


@pytest.fixture(scope="module")
def start_mb(live: Live, text: str) -> float:
    """Return that server's memory."""
    return float(rest(live)["rss_mb"])


def said(live: Live) -> str:
    answer = live.ask("/v1/completions", ALONE)
    assert answer.status == 200
    return str(answer.json["choices"][0]["text"])


class Asked:
    """Concurrent requests that do not end together, each in its own thread."""

    def __init__(self, live: Live, count: int, **fields: Any) -> None:
        self.answers: list[Answer | Exception] = []
        bodies = [
            LONG | {"stream": i % 4 > 0, "max_tokens": LONG["max_tokens"] - 10 * i, **fields}
            for i in range(count)
        ]
        self.threads = [threading.Thread(target=self._ask, args=(live, body)) for body in bodies]
        for thread in self.threads:
            thread.start()

    def _ask(self, live: Live, body: dict[str, Any]) -> None:
        try:
            self.answers.append(live.ask("/v1/completions", body))
        except (OSError, http.client.HTTPException) as error:
            self.answers.append(error)  # the server exited before the answer was complete

    def wait(self) -> list[Answer | Exception]:
        for thread in self.threads:
            thread.join(timeout=120)
            assert not thread.is_alive()
        return self.answers


def failure(answer: Answer | Exception) -> dict[str, Any] | None:
    """Return an answer's error, also one at the end of a stream; an answer without an end fails."""
    assert isinstance(answer, Answer)
    if answer.status != 200:
        return dict(answer.error)
    if not answer.headers["Content-Type"].startswith("text/event-stream"):
        assert answer.json["choices"][0]["finish_reason"]
        return None
    *_, last = answer.events
    assert "error" in last or last["choices"][0]["finish_reason"]
    return last.get("error")


def rest(live: Live) -> dict[str, Any]:
    """Wait until nothing runs and memory was checked; return the server's info."""
    left = settle(live, live.ask("/server_info").json["clean_checks"] - 1)
    assert not left.used_bytes
    return {**left.info, "rss_mb": left.rss_mb, "files": left.files}


@EXHAUSTIVE
@pytest.mark.parametrize("place", [*PLACES, "no memory"])
def test_a_failed_step_ends_its_requests_with_an_error(
    live: Live, told: Told, text: str, start_mb: float, place: str
) -> None:
    failed = rest(live)["failed_steps"]
    asked = Asked(live, ROWS)
    wait_for(lambda: running(live) > 0)
    told.fail(place)
    errors = [failure(answer) for answer in asked.wait()]
    assert any(errors)
    for error in filter(None, errors):
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert "log" in error["message"] and "told to fail" not in error["message"]
    assert said(live) == text
    after = rest(live)
    assert after["failed_steps"] == failed + 1 and after["rss_mb"] < start_mb + MB_MORE
    assert live.ask("/health").status == live.ask("/ready").status == 200


def test_clients_that_are_killed_leave_nothing(live: Live, text: str) -> None:
    before = rest(live)
    program = (
        "import sys, time, urllib.request as u\n"
        "r = u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode()))\n"
        "while r.read(1): time.sleep(0.01)\n"
    )
    body = json.dumps(LONG | {"n": 4, "temperature": 1, "max_tokens": 480})
    command = [sys.executable, "-Sc", program, f"{live.url}/v1/completions", body]
    clients = [subprocess.Popen(command) for _ in range(3)]
    wait_for(lambda: running(live) >= 4)
    for client in clients:
        client.kill()
    assert {client.wait() for client in clients} == {-signal.SIGKILL}
    assert said(live) == text
    after = rest(live)
    assert after["failed_steps"] == before["failed_steps"] and after["rss_mb"] < before["rss_mb"] + MB_MORE


@EXHAUSTIVE
@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 900\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: ",
    ],
)
def test_slow_uploads_time_out(live: Live, text: str, head: bytes) -> None:
    with connect(live) as sock:
        sock.sendall(head)
        sock.setblocking(False)
        got = bytearray()

        def is_over() -> bool:
            with contextlib.suppress(BlockingIOError):
                data = sock.recv(4096)
                got.extend(data)
                return not data
            sock.send(b"x")
            return False

        with contextlib.suppress(ConnectionError):
            wait_for(is_over)
    assert got.startswith(b"HTTP/1.1 408 ") == head.startswith(b"POST")
    assert said(live) == text


def test_silent_connections_are_closed_and_delay_no_others(live: Live, text: str) -> None:
    form = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "ab"}}
    assert live.ask("/v1/completions", form).status == 200  # its process has files too, and starts when idle
    before = rest(live)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(SILENT, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 500), hard))
    with contextlib.ExitStack() as held:
        for number in range(wanted):
            held.enter_context(connect(live))
            if number % 1000 == 0:
                assert said(live) == text
        assert said(live) == text
    print(f"{wanted} connections said nothing")
    wait_for(lambda: rest(live)["files"] <= before["files"])
    assert said(live) == text


def test_the_server_runs_without_a_writable_log(hybrid: Path) -> None:
    """The disk is full; then the server is told to stop under load, and shuts down in order."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    live = Live("--draft", "none", *EXACT, "--port", str(port), model=str(hybrid))
    live.url = f"http://127.0.0.1:{port}"
    with open("/dev/full", "w") as full:
        live.process = subprocess.Popen(live.command, stdout=full, stderr=full, env=live.env)
    try:
        wait_for(lambda: _is_up(live))
        asked = Asked(live, 12)
        wait_for(lambda: running(live) == 12)
        live.process.send_signal(signal.SIGTERM)
        refused = [_ask_once_more(live) for _ in range(3)]
        assert all(answer is None or answer.status == 503 for answer in refused)
        assert not any(failure(answer) for answer in asked.wait())
        assert live.process.wait(timeout=60) == 0
    finally:
        live.process.kill()
        live.process.wait()


def _is_up(live: Live) -> bool:
    assert live.process.poll() is None
    try:
        return live.ask("/health").status == 200
    except urllib.error.URLError:
        return False


def _ask_once_more(live: Live) -> Answer | None:
    try:
        wait_for(lambda: live.ask("/ready").status == 503)
        return live.ask("/v1/completions", ALONE)
    except OSError:
        return None  # it has finished the running requests and exited


@pytest.mark.parametrize(
    ("options", "place", "code"),
    [
        (("--step-timeout", "1"), "hang", 70),
        (("--step-timeout", "1"), "hold", 1),
        (("--no-exit-on-failure",), "stop", 70),
    ],
)
@EXHAUSTIVE
def test_a_failed_engine_ends_all_requests_with_an_error(
    hybrid: Path, told: Told, options: tuple[str, ...], place: str, code: int
) -> None:
    """A hung step ends the process, for a supervisor to restart it; or the server stays and reports it.

    It also has few file descriptors, and many silent connections. If the GIL is held, nothing can be
    reported.
    """
    live = Live(
        "--draft", "none", *EXACT, *options, model=str(hybrid), env=told.env, entry="tests.server.faulty"
    )
    live.command = ["bash", "-c", 'ulimit -n 200; exec "$@"', "bash", *live.command]
    with live, contextlib.ExitStack() as crowd:
        for _ in range(300):
            crowd.enter_context(connect(live))
        assert said(live)  # the oldest idle connections were closed
        asked = Asked(live, ROWS)
        wait_for(lambda: running(live) > 0)
        told.fail(place)
        answers = asked.wait()
        if place != "hold":
            errors = [failure(answer) for answer in answers]
            assert [error and error["code"] for error in errors] == ["engine_error"] * ROWS
        if place == "stop":
            refused = [live.ask("/health"), live.ask("/ready"), live.ask("/v1/completions", ALONE)]
            assert {(own.status, own.error["code"]) for own in refused} == {(503, "engine_error")}
        else:
            live.process.wait(timeout=60)
        found, log = live.stop()
    assert found == code and "Too many open files" not in log
    assert ("Timeout" if place == "hold" else "CRITICAL") in log


@EXHAUSTIVE
def test_health_reports_a_stalled_step_before_the_process_ends(hybrid: Path, told: Told) -> None:
    options = ("--draft", "none", "--step-timeout", "6")
    with Live(*options, model=str(hybrid), env=told.env, entry="tests.server.faulty") as own:
        assert own.ask("/health").status == own.ask("/ready").status == 200
        asked = Asked(own, 1)
        told.fail("hang")
        wait_for(lambda: own.ask("/health").status == 503)
        found = own.ask("/health")
        assert found.error["code"] == "stalled" and "3 s" in found.error["message"]
        assert own.process.poll() is None
        asked.wait()
        own.process.wait(timeout=60)
        assert own.stop()[0] == 70


def connect(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


@EXHAUSTIVE
def test_an_endless_grammar_compilation_delays_no_other_request(told: Told) -> None:
    with Live(*PLAIN_TEXT, env=told.env, entry="tests.server.faulty") as own, ThreadPoolExecutor(1) as pool:
        form = {"prompt": "a", "max_tokens": 9, "temperature": 0, "structured_outputs": {"regex": "[ab]+"}}
        told.file.write_text("compiled")
        late = pool.submit(own.ask, "/v1/completions", form)
        wait_for(lambda: not told.file.exists())
        assert own.ask("/v1/completions", form | {"structured_outputs": {"choice": ["yes"]}}).status == 200
        answer = late.result()
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs")
        assert f"not compiled within {PATIENCE_S:g} s" in answer.error["message"]
        code, log = own.stop()
        assert code == 0 and "Traceback" not in log


def test_a_task_of_the_server_that_fails_ends_it_with_its_exit_code(tmp_path: Path) -> None:
    told = Told(tmp_path)  # a file of its own: another server's watcher would consume the fault
    with Live(*PLAIN_TEXT, env=told.env, entry="tests.server.faulty") as own:
        told.fail("watched")
        own.process.wait(timeout=60)
        code, log = own.stop()
    assert code == 70 and "told to fail: watched" in log and "a task of the server has failed" in log
    assert "specdec.server.run: stopped" not in log


@EXHAUSTIVE
def test_it_stops_in_bounded_time_with_a_hung_step_and_a_pending_flush(told: Told) -> None:
    settings = ("--drain-seconds", "0.5", "--step-timeout", "600")
    with (
        Live(*PLAIN_TEXT, *settings, env=told.env, entry="tests.server.faulty") as own,
        ThreadPoolExecutor(2) as pool,
    ):
        asked = pool.submit(own.ask, "/v1/completions", ALONE)
        told.fail("hang")
        flushed = pool.submit(own.ask, "/flush_cache", method="POST")
        assert own.stop()[0] == 0
        for waiting in (asked, flushed):
            with contextlib.suppress(urllib.error.URLError, http.client.HTTPException, ConnectionError):
                assert waiting.result().status in (200, 503)
