"""Three APIs over one engine: the official clients parse them, and conversations agree."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from specdec.server.parse import MOST_PARTS
from tests.server.live import Answer, Live, total
from tests.server.tools.scripted import write_scripted

Json = dict[str, Any]
KEYS = ("alice", "bob")
PARIS, ROME = '{"city": "Paris", "days": 3}', '{"city": "Rome"}'
CALLS = [f'<tool_call>\n{{"name": "weather", "arguments": {own}}}\n</tool_call>' for own in (PARIS, ROME)]
SCRIPTS = {
    "1": f"<think>\nWhere to? Both.\n</think>\n\nI look.\n{CALLS[0]}\n{CALLS[1]}",
    "4": "Sunny, and 21 °C.",
}
TEMPLATE = (
    "{% if tools %}<tool_call>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments.items() | list }}{% endfor %}{% endfor %}"
    "[assistant]{{ messages[-1].content[-1:] }}"
)
SCHEMA: Json = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
SAYS = "Tell the weather."
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": SAYS, "parameters": SCHEMA}}
RESPONSE_TOOL: Any = {"type": "function", "name": "weather", "description": SAYS, "parameters": SCHEMA}
MESSAGE_TOOL: Any = {"name": "weather", "description": SAYS, "input_schema": SCHEMA}
SYSTEM, ASK = "Be brief.", "Ask 1"
RESULTS = ("Rain.", "Sun: 4")
STREAMED: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGED: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
GREEDY = {"temperature": 0}
"""Anthropic's newer models take no temperature, and its client has no argument for it."""
ENDLESS: Json = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("apis") / "scripted"
    write_scripted(folder, SCRIPTS, TEMPLATE)
    keys = [word for key in KEYS for word in ("--api-key", key)]
    with Live(*keys, "--max-stored-responses", "12", model=str(folder)) as own:
        yield own


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEYS[0], max_retries=0) as own:
        yield own


@pytest.fixture(scope="module")
def claude(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key=KEYS[0], max_retries=0) as own:
        yield own


def post(live: Live, path: str, body: object, key: str = KEYS[0], **headers: str) -> Answer:
    return live.ask(path, body, authorization=f"Bearer {key}", **headers)


def typed_events(answer: Answer) -> list[Json]:
    """Return a stream's events, checking that each is named by its type."""
    found = re.findall(r"event: (\S+)\ndata: (.*)\n\n", answer.data.decode())
    events = [json.loads(data) for _, data in found]
    assert [name for name, _ in found] == [event["type"] for event in events]
    assert len(found) == answer.data.count(b"\n\n")
    return events


def chat_turn(client: openai.OpenAI, messages: list[Any], *, stream: bool) -> tuple[str, list[str], Json]:
    """Return a chat's thinking, its calls' arguments, and the message to send back."""
    fields: Json = {"model": "scripted", "messages": messages, "tools": [CHAT_TOOL], "temperature": 0}
    if stream:
        with client.chat.completions.stream(**fields) as events:
            for _ in events:
                pass
            message = events.get_final_completion().choices[0].message.model_dump(exclude_none=True)
    else:
        message = client.chat.completions.create(**fields).choices[0].message.model_dump(exclude_none=True)
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    message["tool_calls"] = [
        {
            "id": call["id"],
            "type": "function",
            "function": {k: call["function"][k] for k in ("name", "arguments")},
        }
        for call in message.get("tool_calls", ())
    ]
    return message.get("reasoning_content", ""), calls, message


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_is_the_same_in_each(
    client: openai.OpenAI, claude: anthropic.Anthropic, *, stream: bool
) -> None:
    chat: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK}]
    thought, calls, answer = chat_turn(client, chat, stream=stream)
    told = (thought, answer["content"], calls)
    assert (thought.strip(), answer["content"].strip()) == ("Where to? Both.", "I look.")
    assert [json.loads(own) for own in calls] == [json.loads(own) for own in (PARIS, ROME)]

    fields: Any = {"model": "scripted", "tools": [RESPONSE_TOOL], "temperature": 0, "instructions": SYSTEM}
    response = client_responds(client, stream=stream, input=ASK, **fields)
    reasoning, said, *called = response.output
    assert told == (
        reasoning.content[0].text,
        said.content[0].text,
        [own.arguments for own in called],
    )
    blocks: Any = {"model": "scripted", "tools": [MESSAGE_TOOL], "extra_body": GREEDY, "max_tokens": 200}
    blocks |= {"system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]}
    message = claude_answers(claude, stream=stream, messages=[{"role": "user", "content": ASK}], **blocks)
    thinking, text, *uses = message.content
    assert told[:2] == (thinking.thinking, text.text) and message.stop_reason == "tool_use"
    assert [use.input for use in uses] == [json.loads(own) for own in calls]

    # Tool results are sent back: with the whole conversation, by the stored response, and as blocks.
    chat += [answer]
    chat += [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(answer["tool_calls"], RESULTS, strict=True)
    ]
    _, none, last = chat_turn(client, chat, stream=stream)
    assert not none and last["content"] == SCRIPTS["4"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": own.call_id, "output": result}
        for own, result in zip(called, RESULTS, strict=True)
    ]
    again = [{"role": "user", "content": ASK}, *(own.to_dict() for own in response.output), *results]
    whole = client_responds(client, stream=stream, input=again, store=False, **fields)
    chained = client_responds(
        client, stream=stream, input=results, previous_response_id=response.id, **fields
    )
    back: list[Any] = [
        {"type": "tool_result", "tool_use_id": own.id, "content": [{"type": "text", "text": result}]}
        for own, result in zip(uses, RESULTS, strict=True)
    ]
    turns = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": [own.to_dict() for own in message.content]},
        {"role": "user", "content": back},
    ]
    ended = claude_answers(claude, stream=stream, messages=turns, **blocks)
    assert whole.output_text == chained.output_text == ended.content[0].text == SCRIPTS["4"]
    assert whole.status == chained.status == "completed" and ended.stop_reason == "end_turn"
    # The prompts were identical, token for token: all but the first hit the cache.
    count = claude.messages.count_tokens(
        **{name: blocks[name] for name in ("model", "tools", "system")}, messages=turns
    )
    prompt = ended.usage.input_tokens + (ended.usage.cache_read_input_tokens or 0)
    assert {count.input_tokens, prompt, whole.usage.input_tokens} == {chained.usage.input_tokens}
    assert chained.usage.input_tokens_details.cached_tokens > 0


def client_responds(client: openai.OpenAI, *, stream: bool, **fields: Any) -> Any:
    """Return a response, assembled by the client's own accumulator if streamed."""
    if not stream:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as events:
        for _ in events:
            pass
        return events.get_final_response()


def claude_answers(claude: anthropic.Anthropic, *, stream: bool, **fields: Any) -> Any:
    if not stream:
        return claude.messages.create(**fields)
    with claude.messages.stream(**fields) as events:
        return events.get_final_message()


@pytest.mark.parametrize("summary", [None, "auto"])
def test_events_of_responses_are_of_the_clients_types(live: Live, summary: str | None) -> None:
    custom = {"type": "custom", "name": "weather", "description": SAYS}
    group = {"type": "namespace", "name": "mcp__sky", "description": "", "tools": [{**RESPONSE_TOOL}]}
    fields: Json = {"input": ASK, "stream": True, "reasoning": {"summary": summary}, "store": False}
    for tools in ([custom, {"type": "web_search"}], [RESPONSE_TOOL, group]):
        answer = post(live, "/v1/responses", fields | {"tools": tools})
        events = typed_events(answer)
        for event in events:
            STREAMED.validate_python(event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
        reads = "reasoning_summary_text" if summary else "reasoning_text"
        items, where = events[-1]["response"]["output"], [k for k in kinds if k == f"{reads}.done"]
        assert where and [item["type"] for item in items[:2]] == ["reasoning", "message"]
        for kind in ("output_item.added", "output_item.done"):
            own = [e for e in events if e["type"] == f"response.{kind}"]
            assert [e["item"]["id"] for e in own] == [item["id"] for item in items]
            assert [e["output_index"] for e in own] == list(range(len(items)))
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == items
        for index, item in enumerate(items):
            deltas = [e["delta"] for e in events if e.get("output_index") == index and "delta" in e]
            part = (item.get("summary") or item.get("content") or [{}])[0]
            assert "".join(deltas) == part.get("text") or item.get("arguments") or item["input"]
        assert ("tools.web_search" in answer.headers.get("x-specdec-ignored-fields", "")) == (
            tools[0] is custom
        )
        kind = "custom_tool_call" if tools[0] is custom else "function_call"
        assert [item["type"] for item in items[2:]] == [kind] * 2


def test_events_of_messages_are_of_the_clients_types(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": ASK}], "tools": [MESSAGE_TOOL], "max_tokens": 200}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    answer = live.ask("/v1/messages?beta=true", body | {"stream": True}, x_api_key=KEYS[0], **headers)
    events = typed_events(answer)
    for event in events:
        if event["type"] != "ping":
            MESSAGED.validate_python(event)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"]
    assert deltas.count("signature_delta") == 1 and {*deltas} >= {"thinking_delta", "input_json_delta"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"]["output_tokens"] > 9


def test_calls_are_forced(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "scripted", "temperature": 0, "input": "Ask 4"}
    response = client.responses.create(
        **fields, tools=[RESPONSE_TOOL], tool_choice={"type": "function", "name": "weather"}, store=False
    )
    (call,) = response.output
    other: Any = {"type": "function", "name": "other", "parameters": {"type": "object"}}
    named: Any = [{"type": "function", "name": "weather"}, {"type": "web_search_preview"}]
    some: Any = {"type": "allowed_tools", "mode": "required", "tools": named}
    allowed = client.responses.create(
        **fields, tools=[other, RESPONSE_TOOL], tool_choice=some, parallel_tool_calls=False, store=False
    )
    assert [own.arguments for own in allowed.output] == [call.arguments]  # type: ignore[union-attr]
    chats: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    chat = client.chat.completions.create(
        model="scripted",
        temperature=0,
        messages=[{"role": "user", "content": "Ask 4"}],
        tools=[CHAT_TOOL, {"type": "function", "function": {"name": "other"}}],  # type: ignore[list-item]
        tool_choice={"type": "allowed_tools", "allowed_tools": chats},
        parallel_tool_calls=False,
    )
    (called,) = chat.choices[0].message.tool_calls or ()
    assert called.type == "function" and called.function.arguments == call.arguments
    turns: Any = [{"role": "user", "content": "Ask 4"}]
    message = claude.messages.create(
        model="scripted",
        max_tokens=200,
        extra_body=GREEDY,
        messages=turns,
        tools=[MESSAGE_TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    (use,) = message.content
    assert call.type == "function_call" and use.type == "tool_use" and message.stop_reason == "tool_use"
    assert json.loads(call.arguments) == use.input and use.input["city"] in ("Paris", "Rome")
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    shaped = client.responses.create(**fields, text=form, store=False)
    plain = client.responses.create(**fields, text={"verbosity": "low"}, store=False)
    assert plain.text and plain.text.format and plain.text.format.type == "text"
    assert json.loads(shaped.output_text)["city"] in ("Paris", "Rome")
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    told = claude.messages.create(
        model="scripted", max_tokens=200, extra_body=GREEDY, messages=turns, output_config=config
    )
    assert told.content[0].type == "text" and told.content[0].text == shaped.output_text


def test_ends_are_told(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "scripted", "temperature": 0}
    cut = client.responses.create(**fields, input="Ask 4", max_output_tokens=2, store=False)
    assert cut.status == "incomplete" and cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].type == "message" and cut.output[0].status == "incomplete"
    turns: Any = [{"role": "user", "content": "Ask 4"}]
    fields = {"model": "scripted", "extra_body": GREEDY}
    stopped = claude.messages.create(**fields, max_tokens=99, messages=turns, stop_sequences=[" 21"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " 21")
    assert stopped.content[0].type == "text" and stopped.content[0].text == "Sunny, and"
    assert claude.messages.create(**fields, max_tokens=2, messages=turns).stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_is_reduced_to_the_context_and_reported(live: Live, stream: bool) -> None:
    most = live.ask("/v1/models", authorization=f"Bearer {KEYS[0]}").json["data"][0]["max_model_len"]
    turns = {"messages": [{"role": "user", "content": "Ask 4"}]}
    for path, body, field in (
        ("/v1/completions", {"prompt": "Ask 4", "stop": ["a", "e", " "]}, "max_tokens"),
        ("/v1/chat/completions", turns, "max_tokens"),
        ("/v1/responses", {"input": "Ask 4"}, "max_output_tokens"),
        ("/v1/messages", turns, "max_tokens"),
    ):
        told = []
        for asked in (2, 1_000_000):
            answer = post(live, path, {**body, field: asked, "temperature": 0, "stream": stream})
            assert answer.status == 200, answer.data
            told.append(int(answer.headers["x-specdec-max-tokens"]))
        assert told[0] == 2 and most - 200 < told[1] < most


def test_budgets_and_counts_of_thinking_are_without_its_markers(live: Live) -> None:
    """Both markers take several tokens here."""

    def spent(**fields: Any) -> tuple[int, str]:
        own = {"input": ASK, "max_output_tokens": 64, "temperature": 0, **fields}
        answer = post(live, "/v1/responses", own)
        usage, (first, *_) = answer.json["usage"], answer.json["output"]
        counted = int(usage["output_tokens_details"]["reasoning_tokens"])
        return counted, first["content"][0]["text"] if first["type"] == "reasoning" else ""

    whole, thought = spent()
    assert 8 > whole > 2 and thought == "Where to? Both."
    assert spent(thinking_budget=whole + 1) == spent(thinking_budget=whole) == (whole, thought)
    for budget in range(1, whole):  # the start marker's last token already contains thinking
        count, text = spent(thinking_token_budget=budget)
        assert count == budget and thought.startswith(text) and len(text) < len(thought)


def test_responses_are_visible_to_their_key_only(live: Live, client: openai.OpenAI) -> None:
    made = client.responses.create(model="scripted", input="Ask 4", metadata={"a": "b"})
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict() and found.metadata == {"a": "b"}
    go_on = {"input": "Ask 4", "previous_response_id": made.id}
    others = openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEYS[1], max_retries=0)
    with others:
        for wrong in (others.responses.retrieve, others.responses.delete):
            with pytest.raises(openai.NotFoundError):
                wrong(made.id)
    refused = post(live, "/v1/responses", go_on, key=KEYS[1])
    unknown = post(live, "/v1/responses", go_on | {"previous_response_id": "resp_none"}, key=KEYS[1])
    assert refused.status == 404 and refused.error["param"] == "previous_response_id"
    assert refused.error["message"].replace(made.id, "resp_none") == unknown.error["message"]
    client.responses.delete(made.id)
    assert post(live, "/v1/responses", go_on).status == 404
    loose = client.responses.create(model="scripted", input="Ask 4", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(loose.id)
    for _ in range(14):
        client.responses.create(model="scripted", input="Ask 4")
    held = live.ask("/server_info", authorization=f"Bearer {KEYS[0]}").json["stored_responses"]
    assert held["count"] == 12 and 0 < held["bytes"] < 1 << 20


def test_errors_have_the_format_of_the_api(
    live: Live, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    turn: Any = [{"role": "user", "content": "Ask 4"}]
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    wrong: list[tuple[Mapping[str, Any], str]] = [
        ({"messages": [{"role": "user", "content": [picture]}]}, "messages.0.content.0"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "x", "content": [picture]}],
                    }
                ]
            },
            "messages.0.content.0",
        ),
        ({"messages": [*turn, {"role": "assistant", "content": "So"}]}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens: give a number of at least 1"),
        ({"keep_alive": True}, "keep_alive"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages.0.content: no tool_use block before it has the id 'x'",
        ),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [MESSAGE_TOOL]}, "tool_choice"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"system": [{"type": "text"}]}, "system.0: a part of type 'text' lacks its text; give it."),
        ({"system": {"text": "a"}}, "system: give a string, or a list of parts."),
        ({"messages": [{**turn[0], "images": ["x"]}]}, "messages.0: images is not supported"),
        ({"cache_control": {"type": "ephemeral", "ttl": "9d"}}, "cache_control.ttl"),
    ]
    for fields, named in wrong:
        answer = post(live, "/v1/messages", {"messages": turn, "max_tokens": 9} | fields)
        own = answer.json
        assert (answer.status, own["type"], own["error"]["type"]) == (400, "error", "invalid_request_error")
        assert named in own["error"]["message"], own
    with pytest.raises(anthropic.NotFoundError, match="served"):
        claude.messages.create(model="claude-x", max_tokens=9, messages=turn)
    stranger = anthropic.Anthropic(base_url=live.url, api_key="other", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(model="scripted", max_tokens=9, messages=turn)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    assert post(live, "/v1/messages/nothing", {}).json["error"]["type"] == "not_found_error"
    result = {"type": "function_call_output", "call_id": "c"}
    made = client.responses.create(model="scripted", input="Ask 4").id
    for body, named in (
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": "a", "images": ["x"]}]}, "input.0: images is not supported"),
        ({"input": [{**result, "output": {"a": 1}}]}, "input.0.output: give a string, or a list of parts."),
        (
            {"input": [{**result, "output": [{"type": "input_text"}]}], "previous_response_id": made},
            "input.0: a part of type 'input_text' lacks its text; give it.",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input.0.content.0: file_id is not supported",
        ),
        (
            {
                "input": "a",
                "tools": [RESPONSE_TOOL],
                "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]},
            },
            "tool_choice",
        ),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens: give a number of at least 1"),
        ({"input": "a", "keep_alive": -2}, "keep_alive"),
        ({"input": [{**result, "output": "4"}]}, "input.0.call_id: no call before it has the id 'c'"),
        ({"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
        ({}, "input"),
    ):
        answer = post(live, "/v1/responses", body)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert answer.error["param"] == named.partition(":")[0].split(".0")[0]
        assert named in answer.error["message"], answer.json
    wrong_form = {
        "messages": turn,
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    answer = post(live, "/v1/chat/completions", wrong_form)
    assert answer.status == 400 and "tool_choice: give auto, none" in answer.error["message"]
    with pytest.raises(openai.NotFoundError, match="only generates text"):
        client.embeddings.create(model="scripted", input="a")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (None, "it is required"),
        (5, "give an object"),
        ({"type": "odd"}, "Invalid type: odd"),
        ({"type": "array", "items": {}, "uniqueItems": True}, 'unsupported: ["uniqueItems"]'),
    ],
)
def test_an_invalid_schema_is_named_by_each_apis_field(live: Live, schema: Any, says: str) -> None:
    own = {} if schema is None else {"schema": schema}
    form: Any = {"type": "json_schema", **own}
    chat: Any = {"type": "json_schema", "json_schema": {"name": "a", **own}}
    turn = {"messages": [{"role": "user", "content": "Ask 4"}], "max_tokens": 4}
    for address, body, field in (
        ("/v1/completions", {"prompt": "a", "response_format": chat}, "response_format.json_schema.schema"),
        ("/v1/chat/completions", turn | {"response_format": chat}, "response_format.json_schema.schema"),
        ("/v1/responses", {"input": "a", "text": {"format": form}}, "text.format.schema"),
        ("/v1/messages", turn | {"output_config": {"format": form}}, "output_config.format.schema"),
        ("/v1/messages", turn | {"output_format": form}, "output_format.schema"),
    ):
        answer = post(live, address, body)
        assert answer.status == 400 and answer.json["error"]["message"].startswith(f"{field}: {says}"), (
            answer.json
        )
        param = answer.json["error"].get("param", "output")  # Anthropic's errors have none
        assert field.startswith(param)


def test_models_are_described_to_each_client(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    for models in (client.models.list(), claude.models.list(limit=1)):
        assert [model.id for model in models] == ["scripted"]
    found = claude.models.retrieve("scripted")
    assert (found.type, found.display_name) == ("model", "scripted") and found.created_at.year > 2024
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.models.retrieve("other")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_leaving_a_stream_ends_its_request(
    live: Live, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    fields: Any = {"model": "scripted", "temperature": 1.0}
    form: Any = {"format": {"type": "json_schema", "name": "endless", "schema": ENDLESS}}
    with client.responses.create(**fields, input="Ask 4", text=form, stream=True) as events:
        next(iter(events))
    config: Any = {"format": {"type": "json_schema", "schema": ENDLESS}}
    turns: Any = [{"role": "user", "content": "Ask 4"}]
    with claude.messages.create(
        model="scripted", max_tokens=1500, messages=turns, output_config=config, stream=True
    ) as messages:
        next(iter(messages))
    client.responses.create(model="scripted", input="Ask 4", store=False)
    figures = live.metrics()
    assert total(figures, "vllm:num_requests_running") == 0
    left = [n for name, n in figures.items() if "request_success_total" in name and '"abort"' in name]
    assert left == [2]
    for path in ("/v1/messages", "/v1/responses"):
        assert any(name.startswith("http_requests_total") and f'"{path}"' in name for name in figures)


def test_hostile_bodies_are_refused(live: Live) -> None:
    lone = [{"type": "custom_tool_call", "call_id": "a", "name": "f", "input": "\ud800"}]
    deep: Any = "x"
    for _ in range(140):
        deep = {"a": deep}
    bodies: list[tuple[str, Json, int]] = [
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 60_000}, 400),
        ("/v1/responses", {"input": "a", "metadata": dict.fromkeys(map(str, range(17)), "b")}, 400),
        ("/v1/responses", {"input": "a", "previous_response_id": "r" * 200}, 400),
        ("/v1/responses", {"input": [{"type": []}]}, 400),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "parameters": deep}]}, 400),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "tools": [{"type": "x"}] * 20_000}, 200),
        ("/v1/responses", {"input": [*lone, {"role": "user", "content": "4"}], "max_output_tokens": 2}, 200),
        ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": [{}] * 20_000}]}, 400),
        ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": [[]]}]}, 400),
        ("/v1/messages", {"max_tokens": 10**30, "messages": [{"role": "user", "content": "4"}]}, 400),
    ]
    for path, body, status in bodies:
        answer = post(live, path, body)
        assert answer.status == status and len(answer.data) < 1 << 20, (body.keys(), answer.data[:300])
    made = post(live, "/v1/responses", {"input": [*lone, {"role": "user", "content": "4"}]}).json["id"]
    assert post(live, "/v1/responses", {"input": "Ask 4", "previous_response_id": made}).status == 200
    # A chain of responses is limited to as many items as a body has parts: each is processed again.
    many = [*[{"type": "reasoning"}] * (MOST_PARTS * 2 // 5), {"role": "user", "content": "4"}]
    chain, statuses = None, list[int]()
    for _ in range(3):
        answer = post(live, "/v1/responses", {"input": many, "previous_response_id": chain})
        statuses.append(answer.status)
        chain = answer.json.get("id")
    assert statuses == [200, 200, 400] and answer.error["param"] == "previous_response_id"
    assert "items; start a new one" in answer.error["message"]
    assert live.ask("/v1/responses/" + "a" * 5000, authorization=f"Bearer {KEYS[0]}").status == 404
