"""Invalid HTTP and unacceptable bodies get an error in OpenAI's format, without a server error."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.live import Live
from tests.server.test_guards import PLAIN

SECRET = b"Bearer " + b"s" * 20_000
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CASES: dict[str, tuple[int, bytes]] = {
    "a header with a NUL": (400, b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01" * 9),
    "no request line": (400, b"GET /" * 9000),
    "an unknown method": (400, b"FOO! / HTTP/1.1\r\nHost: a\r\n\r\n"),
    "an unknown version": (400, b"GET / HTTP/9.9\r\nHost: a\r\n\r\n"),
    "no host": (400, b"GET /v1/models HTTP/1.1\r\n\r\n"),
    "no address": (400, b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n"),
    "a long line": (431, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
    "a long header": (431, b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: " + SECRET + b"\r\n\r\n"),
    "many headers": (400, b"GET / HTTP/1.1\r\n" + b"".join(b"A%d: b\r\n" % i for i in range(400)) + b"\r\n"),
    "two lengths": (400, POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"),
    "no length": (400, POST + b"Content-Length: abc\r\n\r\n"),
    "no chunk": (400, POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n"),
    "an unknown coding": (400, POST + b"Transfer-Encoding: foo\r\n\r\n{}"),
    "an unknown encoding": (415, POST + b"Content-Encoding: foo\r\nContent-Length: 2\r\n\r\n{}"),
    "two encodings": (415, POST + b"Content-Encoding: gzip, gzip\r\nContent-Length: 2\r\n\r\n{}"),
    "no gzip": (400, POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"),
    "another expectation": (
        417,
        b"POST /none HTTP/1.1\r\nHost: a\r\nExpect: tea\r\nContent-Length: 0\r\n\r\n",
    ),
    "another expectation of what there is": (417, POST + b"Expect: tea\r\nContent-Length: 2\r\n\r\n{}"),
    "too much, and nothing of it": (413, POST + b"Content-Length: 100000000\r\n\r\n"),
    "too much after a pause": (413, POST + b"Expect: 100-continue\r\nContent-Length: 100000000\r\n\r\n"),
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(*PLAIN, "--body-timeout", "600") as own:
        yield own
        said = own.stop()[1]
        assert "Traceback" not in said and " ERROR " not in said and "ssss" not in said


def send(live: Live, data: bytes) -> tuple[int, dict[str, str], Any]:
    """Send bytes and read the answer, which arrives although the announced rest never does."""
    url = urlsplit(live.url)
    with socket.create_connection((url.hostname, url.port), timeout=60) as sock:
        sock.sendall(data)
        return read(sock)


def read(sock: socket.socket) -> tuple[int, dict[str, str], Any]:
    with sock.makefile("rb") as answer:
        status = int(answer.readline().split()[1])
        lines = iter(lambda: answer.readline().decode().strip(), "")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return status, headers, answer.read(int(headers.get("content-length", 0)))


@pytest.mark.parametrize("case", CASES)
def test_garbage_is_answered_as_a_client_error(live: Live, case: str) -> None:
    expected, data = CASES[case]
    status, headers, body = send(live, data)
    error = json.loads(body)["error"]
    assert status == expected and headers["content-type"].startswith("application/json")
    assert error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".") and "\n" not in error["message"] and "sss" not in error["message"]
    assert headers["server"] == "specdec" and b"aiohttp" not in body and b"ython" not in body
    assert live.ask("/health").status == 200


def test_expect_100_continue_is_answered(live: Live) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    url = urlsplit(live.url)
    with socket.create_connection((url.hostname, url.port), timeout=60) as sock:
        sock.sendall(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert read(sock)[0] == 100
        sock.sendall(body)
        status, _, answer = read(sock)
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 1


def test_no_answer_reveals_versions(live: Live) -> None:
    for path in ("/health", "/nothing", "/v1/models", "/"):
        assert live.ask(path).headers["Server"] == "specdec"
    assert (
        live.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, "stream": True}).headers["Server"]
        == "specdec"
    )
