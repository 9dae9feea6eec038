"""CORS for other origins, with and without keys."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from specdec.errors import ConfigError
from specdec.server.origins import Origins
from tests.server.live import Answer, Live, serving
from tests.server.test_guards import PLAIN

APP, OTHER = "https://app.example", "https://other.example"
SENT = "authorization,content-type,x-api-key,x-stainless-lang"
"""Request headers that a browser announces for OpenAI's client."""
PROMPT: dict[str, Any] = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def listed() -> Iterator[Live]:
    """A server with a key that pages of one origin may use."""
    yield from serving(*PLAIN, "--api-key", "given", "--allowed-origins", APP)


@pytest.fixture(scope="module")
def keyless() -> Iterator[Live]:
    yield from serving(*PLAIN, "--allowed-origins", APP)


def preflight(live: Live, origin: str, path: str = "/v1/completions", **headers: str) -> Answer:
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": SENT}
    return live.ask(path, method="OPTIONS", Origin=origin, **asked, **headers)


def allowed(answer: Answer) -> dict[str, str]:
    return {k.lower()[15:]: v for k, v in answer.headers.items() if k.lower().startswith("access-control-")}


def test_a_preflight_is_answered_before_the_key_is_looked_at(listed: Live) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health"):
        answer = preflight(listed, APP, path)
        own = allowed(answer)
        assert (answer.status, answer.data) == (204, b"")
        assert own["allow-origin"] == APP and answer.headers["Vary"] == "Origin"
        assert own["allow-headers"] == SENT and "POST" in own["allow-methods"]
        assert "allow-credentials" not in own


def test_a_page_reads_answers_errors_and_streams(listed: Live) -> None:
    key = {"Authorization": "Bearer given", "Origin": APP}
    asked: list[tuple[int, Any, dict[str, str]]] = [
        (200, PROMPT, key),
        (200, PROMPT | {"stream": True}, key),
        (400, {"prompt": 7}, key),
        (413, {"prompt": "x" * (17 << 20)}, key),
        (401, PROMPT, {"Origin": APP}),
    ]
    for status, body, headers in asked:
        answer = listed.ask("/v1/completions", body, **headers)
        assert (answer.status, allowed(answer)["allow-origin"]) == (status, APP)
        assert "X-Request-ID" in allowed(answer)["expose-headers"] and answer.headers["Vary"] == "Origin"
    for path, status in (("/nothing", 404), ("/v1/completions", 405), ("/health", 200)):
        answer = listed.ask(path, **key)
        assert (answer.status, allowed(answer)["allow-origin"]) == (status, APP)


def test_other_origins_get_no_cors_headers(listed: Live) -> None:
    for origin in (
        OTHER,
        "null",
        "https://app.example.evil",
        "http://app.example",
        "https://app.example:444",
    ):
        answer = preflight(listed, origin)
        assert answer.status == 403 and not allowed(answer)
        assert answer.error["code"] == "foreign_origin" and "--allowed-origins" in answer.error["message"]
        answered = listed.ask("/v1/completions", PROMPT, Authorization="Bearer given", Origin=origin)
        assert answered.status == 200 and not allowed(answered) and answered.headers["Vary"] == "Origin"
    assert not allowed(listed.ask("/v1/completions", PROMPT, Authorization="Bearer given"))


def test_without_keys_only_listed_origins_on_this_machine_are_allowed(keyless: Live) -> None:
    assert preflight(keyless, APP).status == 204
    assert keyless.ask("/v1/completions", PROMPT, Origin=APP).status == 200
    assert keyless.ask("/v1/completions", PROMPT, Origin=OTHER).error["code"] == "foreign_origin"
    assert preflight(keyless, OTHER).error["code"] == "foreign_origin"
    for origin in (APP, "http://rebound.example"):
        for answer in (
            preflight(keyless, origin, Host="rebound.example"),
            keyless.ask("/v1/completions", PROMPT, Origin=origin, Host="rebound.example"),
        ):
            assert (answer.status, answer.error["code"]) == (403, "foreign_host")


def test_a_wildcard_allows_all_origins_but_no_rebound_name() -> None:
    with Live(*PLAIN, "--allowed-origins", "*") as live:
        assert allowed(preflight(live, OTHER))["allow-origin"] == "*"
        answer = live.ask("/v1/completions", PROMPT, Origin=OTHER)
        assert (answer.status, allowed(answer)["allow-origin"]) == (200, "*")
        rebound = {"Origin": "http://rebound.example", "Host": "rebound.example"}
        assert live.ask("/v1/completions", PROMPT, **rebound).error["code"] == "foreign_host"
        assert "every page" in live.stop()[1]


def test_by_default_no_answer_has_cors_headers() -> None:
    with Live(*PLAIN) as live:
        refused = live.ask("/v1/completions", PROMPT, Origin=APP)
        assert refused.status == 403 and "--allowed-origins" in refused.error["message"]
        for answer in (refused, preflight(live, APP), live.ask("/health", Origin=APP)):
            assert not allowed(answer) and "Vary" not in answer.headers


def test_a_header_that_a_page_may_not_name_is_not_repeated(listed: Live) -> None:
    url = urlsplit(listed.url)
    head = ["OPTIONS /v1/models HTTP/1.1", "Host: x", f"Origin: {APP}", "Connection: close"]
    head += ["Access-Control-Request-Method: GET", "Access-Control-Request-Headers: a<b>"]
    with socket.create_connection((url.hostname, url.port)) as sock:
        sock.sendall("\r\n".join([*head, "", ""]).encode())
        said = b"".join(iter(lambda: sock.recv(4096), b""))
    assert said.startswith(b"HTTP/1.1 204") and b"<b>" not in said


def test_a_key_may_come_in_either_header(listed: Live) -> None:
    assert listed.ask("/v1/models", x_api_key="given").status == 200
    assert listed.ask("/v1/models", x_api_key="given", Authorization="Bearer other").status == 200
    for headers in ({"x_api_key": "Bearer given"}, {"x_api_key": ""}, {"x_api_key": "g"}, {}):
        answer = listed.ask("/v1/models", **headers)
        assert answer.status == 401 and "x-api-key" in answer.error["message"]
    own = {"base_url": f"{listed.url}/v1", "max_retries": 0}
    with openai.OpenAI(
        api_key="wrong", default_headers={"x-api-key": "given", "Origin": APP}, **own
    ) as client:  # type: ignore[arg-type]
        answer = client.models.with_raw_response.list()
        assert answer.headers["Access-Control-Allow-Origin"] == APP
        assert json.loads(answer.content)["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    "given", ["app.example", "https://app.example/path", "https://", "https://a b", "null", "https://a@b", ""]
)
def test_invalid_origins_are_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_origins: .*such as"):
        Origins([given])


def test_origins_are_compared_as_browsers_write_them() -> None:
    own = Origins(["HTTPS://App.Example:443", "http://a:80", "http://b:8080", "tauri://localhost"])
    for origin in (APP, "http://a", "http://b:8080", "tauri://localhost"):
        assert own.allow(origin)
    for origin in ("https://app.example:80", "http://b", "https://a", "null", "*", ""):
        assert not own.allow(origin)


def test_foreign_pages_read_nothing_of_open_paths(listed: Live, keyless: Live) -> None:
    for live in (listed, keyless):
        for path in ("/metrics", "/health", "/ready", "/version", "/openapi.json", "/docs", "/", "/none"):
            for method in ("GET", "HEAD", "POST"):
                for foreign in ({"Host": "rebound.example"}, {"Origin": OTHER}):
                    status = live.ask(path, method=method, **foreign).status
                    assert status in ((403, 401) if live is listed else (403,)), (path, method, foreign)
            assert live.ask(path, Host="app.example", Origin=APP).status in (200, 404, 401)


def test_figures_need_a_key_unless_they_are_open(listed: Live) -> None:
    assert listed.ask("/metrics").error["code"] == "invalid_api_key"
    assert listed.ask("/metrics", x_api_key="given").status == 200
    for options in (("--api-key", "given", "--metrics-open"), ()):
        with Live(*PLAIN, *options) as live:
            assert live.ask("/metrics").status == 200
            assert live.ask("/metrics", Host="rebound.example").error["code"] == "foreign_host"
            assert live.ask("/metrics", Origin=OTHER).error["code"] == "foreign_origin"
