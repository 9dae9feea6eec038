"""Event writers without a server: failing streams, and broken arguments."""

import json
from typing import Any

import pytest
from anthropic.types import Message
from openai.types import CompletionChoice
from openai.types.chat.chat_completion import Choice
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from specdec.core.outputs import Delta, FinishReason
from specdec.server.anthropic.writer import BROKEN, MessageWriter
from specdec.server.events import ExpectedContent
from specdec.server.failures import Failure
from specdec.server.formats import ChatFormat, CompletionFormat, ShownFields, Usage
from specdec.server.responses.bodies import MOST_REPEATED, ResponseBody
from specdec.server.responses.tools import Toolbox
from specdec.server.responses.writer import ResponseWriter
from specdec.server.tools.bodies import Function, Tool
from specdec.server.tools.offer import ToolOffer
from specdec.text.answers.formats import CALL_FORMATS

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = Tool(type="function", function=Function(name="f"))
OFFER = ToolOffer((TOOL,), CALL_FORMATS["hermes"], parallel=True, structure=None)
FAILURE = Failure(503, "The server is stopping.", code="stopping")


def response_writer(kept: list[Any], **fields: Any) -> ResponseWriter:
    body = ResponseBody.read(json.dumps({"input": "a", **fields}).encode())
    toolbox = Toolbox(body.tools or ())
    return ResponseWriter(ExpectedContent(None, OFFER), Usage(3), body, toolbox, "m", kept.append)


def test_failed_streams_end_with_an_error_in_the_apis_format() -> None:
    kept: list[Any] = []
    own = response_writer(kept)
    events = [*own.events(0, Delta("ab", (1, 2))), *own.failed(FAILURE)]
    for event in events:
        EVENT.validate_python(event)
    error, failed = events[-2:]
    assert (error["type"], error["code"]) == ("error", "stopping") and not kept
    assert failed["response"]["status"] == "failed" and failed["response"]["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    message = MessageWriter(ExpectedContent(), Usage(3), "m")
    message.events(0, Delta("ab", (1, 2)))
    assert message.failed(FAILURE) == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "The server is stopping."}}
    ]


@pytest.mark.parametrize(
    ("why", "stop", "response", "message"),
    [
        ("stop", None, ("completed", None), ("end_turn", None)),
        ("stop", "##", ("completed", None), ("stop_sequence", "##")),
        ("length", None, ("incomplete", "max_output_tokens"), ("max_tokens", None)),
    ],
)
def test_finish_reasons_in_the_terms_of_each_api(
    why: FinishReason, stop: str | None, response: Any, message: Any
) -> None:
    delta = Delta("ab", (1, 2), finish_reason=why, stop_reason=stop)
    kept: list[Any] = []
    whole = Response.model_validate_json("".join(response_writer(kept).whole({0: delta})), strict=True)
    details = whole.incomplete_details
    assert (whole.status, details and details.reason) == response
    assert (whole.completed_at is None) == (details is not None) and whole.error is None
    assert kept == [whole.model_dump(mode="json", exclude_unset=True)]
    own = response_writer([])
    *_, last = [EVENT.validate_python(event) for event in [*own.events(0, delta), *own.end()]]
    assert (last.type, last.response.status) == (f"response.{response[0]}", response[0])
    written = Message.model_validate_json(
        "".join(MessageWriter(ExpectedContent(), Usage(3), "m").whole({0: delta}))
    )
    assert (written.stop_reason, written.stop_sequence) == message
    said = Choice.model_validate(ChatFormat(None, ShownFields(), ExpectedContent()).said(0, delta))
    assert (
        said.finish_reason
        == CompletionChoice.model_validate(CompletionFormat(None, ShownFields()).said(0, delta)).finish_reason
        == why
    )


def test_arguments_that_are_no_json_are_given_as_they_are() -> None:
    broken = '{"a": }'
    text = f'<tool_call>\n{{"name": "f", "arguments": {broken}}}\n</tool_call>'
    said = {0: Delta(text, (1,), finish_reason="stop")}
    message = json.loads("".join(MessageWriter(ExpectedContent(None, OFFER), Usage(3), "m").whole(said)))
    assert Message.model_validate(message).stop_reason == "tool_use"
    assert message["content"][0]["input"] == {BROKEN: broken}
    for tool in ({"type": "function", "name": "f"}, {"type": "custom", "name": "f"}):
        (item,) = json.loads("".join(response_writer([], tools=[tool]).whole(said)))["output"]
        assert broken in (item.get("arguments"), item.get("input"))


def test_an_empty_answer_has_no_blocks() -> None:
    said = {0: Delta("", (1,), finish_reason="stop")}
    assert json.loads("".join(response_writer([]).whole(said)))["output"] == []
    message = json.loads("".join(MessageWriter(ExpectedContent(), Usage(3), "m").whole(said)))
    assert message["content"] == [] and message["stop_reason"] == "end_turn"


@pytest.mark.parametrize("field", ["tools", "instructions", "text", "reasoning", "tool_choice"])
def test_a_response_repeats_so_much_and_no_more(field: str) -> None:
    """Otherwise each event with the whole response could be as large as the largest body."""

    def fields(size: int) -> dict[str, Any]:
        long = "a" * size
        return {
            "tools": [{"type": "web_search", "region": long}],
            "instructions": long,
            "text": {"format": {"type": "text", "name": long}},
            "reasoning": {"effort": long},
            "tool_choice": {"type": "function", "name": "f", "region": long},
        }

    own = response_writer([], **{field: fields(MOST_REPEATED - 100)[field]})
    assert len(json.dumps(own.events(0, Delta("ab", (1, 2)))[0])) > MOST_REPEATED - 100
    with pytest.raises(Failure, match=f"^{field}: responses repeat") as refused:
        response_writer([], **{field: fields(MOST_REPEATED)[field]})
    assert (refused.value.status, refused.value.param) == (400, field)
    with pytest.raises(Failure, match="responses repeat"):
        response_writer([], **fields(MOST_REPEATED // 4))
