"""Every error status in each API: the official clients raise the matching exception."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.server.faulty import FILE
from tests.server.live import Live, total

KEY = "mine"
LIMIT, MOST = 1 << 20, 4
TURN: Any = {"role": "user", "content": "import os\n"}
Json = dict[str, Any]
Ask = Callable[[openai.OpenAI, anthropic.Anthropic, Json], Any]
ASKS: dict[str, Ask] = {
    "chat": lambda o, _, own: o.chat.completions.create(**{"model": "tiny", "messages": [TURN], **own}),
    "responses": lambda o, _, own: o.responses.create(**{"model": "tiny", "input": [TURN], **own}),
    "messages": lambda _, a, own: a.messages.create(
        **{"model": "tiny", "messages": [TURN], "max_tokens": 3000, **own}
    ),
}
CLIENTS = (openai.APIError, anthropic.APIStatusError)
PLACE = "said in part"
"""Where the engine's next step fails."""
OPENAI_FIELDS = {"message", "type", "param", "code"}
RAISED: dict[int, tuple[tuple[str, str], tuple[str, str]]] = {
    400: (("BadRequestError", "invalid_request_error"), ("BadRequestError", "invalid_request_error")),
    401: (("AuthenticationError", "authentication_error"), ("AuthenticationError", "authentication_error")),
    404: (("NotFoundError", "not_found_error"), ("NotFoundError", "not_found_error")),
    413: (("APIStatusError", "invalid_request_error"), ("ContentTooLargeError", "request_too_large")),
    429: (("RateLimitError", "rate_limit_error"), ("RateLimitError", "rate_limit_error")),
    500: (("InternalServerError", "server_error"), ("InternalServerError", "api_error")),
    503: (
        ("InternalServerError", "service_unavailable_error"),
        ("ServiceUnavailableError", "overloaded_error"),
    ),
}
"""By status: each client's exception and the error type, OpenAI's and Anthropic's. The last stops the
server."""


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("errors") / "fault"


@pytest.fixture(scope="module")
def live(fault: Path) -> Iterator[Live]:
    options = ("--api-key", KEY, "--max-body-bytes", str(LIMIT), "--max-queued", str(MOST))
    with Live(*options, entry="tests.server.faulty", env={FILE: str(fault)}) as own:
        yield own


@pytest.fixture(scope="module")
def clients(live: Live) -> Iterator[tuple[openai.OpenAI, anthropic.Anthropic]]:
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as theirs,
        anthropic.Anthropic(base_url=live.url, api_key=KEY, max_retries=0) as claude,
    ):
        yield theirs, claude


@contextlib.contextmanager
def busy(live: Live, client: openai.OpenAI, status: int) -> Iterator[None]:
    """Keep the maximum number of choices in flight; for 503, tell the server to stop meanwhile."""
    with client.completions.create(
        model="tiny", prompt="a", n=MOST, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    ) as events:
        next(iter(events))
        if status == 503:
            live.process.send_signal(signal.SIGTERM)
            while live.ask("/ready").status != 503:
                pass
        yield


def fields(status: int, api: str) -> Json:
    """Return the request fields that cause a status, beside the server's state."""
    wrong: dict[int, Json] = {
        400: {"extra_body": {"temperature": -1}},
        401: {"extra_headers": {"Authorization": "Bearer other", "x-api-key": "other"}},
        404: {"model": "other"},
        413: {"input" if api == "responses" else "messages": [{**TURN, "content": "a" * LIMIT}]},
    }
    return wrong.get(status, {})


def test_a_failed_stream_raises_in_each_client(
    clients: tuple[openai.OpenAI, anthropic.Anthropic], fault: Path
) -> None:
    """Clients raise, except for Responses, whose error events are passed on."""
    says = "The engine failed while this request ran; see the server's log."
    for api, ask in ASKS.items():
        raised = contextlib.nullcontext() if api == "responses" else pytest.raises(CLIENTS)
        events: list[Any] = []
        with ask(*clients, {"stream": True, "extra_body": {"temperature": 0}}) as stream, raised as caught:
            for event in stream:
                if not events:
                    fault.write_text(PLACE, "utf-8")
                events.append(event)
        if caught:
            error: Any = caught.value
            form = error.body["error"] if api == "messages" else error.body
            assert (form["type"], form["message"]) == (RAISED[500][api == "messages"][1], says)
        else:
            assert [event.type for event in events[-2:]] == ["error", "response.failed"]
            assert (events[-2].message, events[-1].response.error.code) == (says, "server_error")


@pytest.mark.parametrize("status", RAISED)
def test_clients_raise_what_they_have_for_a_status(
    live: Live, clients: tuple[openai.OpenAI, anthropic.Anthropic], fault: Path, status: int
) -> None:
    theirs, claude = clients
    while total(live.metrics(), "vllm:num_requests_running"):
        pass  # an earlier case's requests may run for one more step
    with busy(live, theirs, status) if status in (429, 503) else contextlib.nullcontext():
        for api, ask in ASKS.items():
            if status == 500:
                fault.write_text(PLACE, "utf-8")
            with pytest.raises(CLIENTS) as caught:
                ask(theirs, claude, fields(status, api))
            error: Any = caught.value
            form = RAISED[status][api == "messages"]
            own = error.body["error"] if api == "messages" else error.body
            assert (type(error).__name__, own["type"]) == form and error.status_code == status
            assert set(own) == ({"type", "message"} if api == "messages" else OPENAI_FIELDS)
            assert error.request_id and own["message"] and error.response.headers["x-request-id"]
            assert ("retry-after" in error.response.headers) == (status in (429, 503))
