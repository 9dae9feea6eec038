"""Tools over HTTP: a model that generates calls, and the official client that parses them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specdec.server.fields import IGNORED
from tests.server.live import Live
from tests.server.tools.scripted import write_scripted
from tests.text.answers.test_calls import call, element

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "default": None},
            },
            "required": ["city"],
        },
    },
}
BOUND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "measure",
        "parameters": {
            "type": "object",
            "properties": {"where": {"enum": ["here", "there"]}, "exact": {"type": "boolean"}},
            "required": ["where", "exact"],
            "additionalProperties": False,
        },
    },
}
UNREADABLE = {"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}
PARIS, ROME = '{"city": "Paris", "days": 3}', '{"city": "Rom \\"é\\" </tool_call>"}'
TEMPLATE = (
    "{% if tools %}SIGN {% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{{ reasoning_effort }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.items() | list }}"
    "{% endfor %}{% endfor %}[assistant]{{ messages[-1].content[-1:] }}"
)
HERMES = {
    "1": call(PARIS, "weather"),
    "2": f"I look.\n{call(PARIS, 'weather')}\n{call(ROME, 'weather')}",
    "3": '<tool_call>\n{"name": weather, "arguments": {}}\n</tool_call>!',
    "4": "Sunny, and 21 °C.",
}
IN_PARIS = (("city", "Paris"), ("days", "3"))
IN_ROME = (("city", json.loads(ROME)["city"]),)
CODER = {
    "1": element(*IN_PARIS, name="weather"),
    "2": f"I look.\n{element(*IN_PARIS, name='weather')}\n{element(*IN_ROME, name='weather')}",
    "3": "<tool_call>\n<function weather>\n</function>\n</tool_call>!",
    "4": "Sunny, and 21 °C.",
}
MODELS = {"hermes": (HERMES, "<tool_call>"), "coder": (CODER, "<function=")}


@pytest.fixture(scope="module", params=MODELS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    scripts, sign = MODELS[request.param]
    folder = tmp_path_factory.mktemp("scripted") / request.param
    write_scripted(folder, scripts, TEMPLATE.replace("SIGN", sign), tags="1")
    with Live("--no-adaptive", model=str(folder)) as own:  # whether drafts pay here depends on the machine
        yield own


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as own:
        yield own


def asked(key: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Ask {key}"}], "tools": [WEATHER], **fields}


def script(live: Live, key: str) -> str:
    name = live.ask("/v1/models").json["data"][0]["id"]
    return MODELS[name][0][key]


@pytest.mark.parametrize(
    ("key", "content", "calls"),
    [("1", None, [PARIS]), ("2", "I look.", [PARIS, ROME]), ("4", "Sunny, and 21 °C.", [])],
)
def test_the_official_client_reads_the_calls(
    client: openai.OpenAI, key: str, content: str | None, calls: list[str]
) -> None:
    """Whole and streamed, the second time from drafts with several tokens per step."""
    model = client.models.list().data[0].id
    for _ in range(2):
        whole = client.chat.completions.create(model=model, **asked(key))
        (choice,) = whole.choices
        assert choice.message.content == content
        own = choice.message.tool_calls or []
        assert [call.function.name for call in own] == ["weather"] * len(calls)
        assert [json.loads(call.function.arguments) for call in own] == [json.loads(text) for text in calls]
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        assert len({call.id for call in own}) == len(own)
        with client.chat.completions.stream(model=model, **asked(key)) as stream:
            for _event in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        assert (streamed.message.content or None, streamed.finish_reason) == (content, choice.finish_reason)
        assert [c.function.arguments for c in streamed.message.tool_calls or []] == [
            c.function.arguments for c in own
        ]
    assert whole.usage and whole.usage.completion_tokens_details
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens


def test_a_model_with_its_own_template_is_a_chat_model(live: Live) -> None:
    info = live.ask("/server_info").json
    parser = "hermes" if info["model"] == "hermes" else "qwen3_coder"
    assert (info["writes"], info["tools"], info["tool_call_parser"]) == ("chats", True, parser)


def test_a_stream_starts_each_call_before_its_arguments(live: Live) -> None:
    events = live.ask(CHAT, asked("2", stream=True)).events
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    opening = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in opening] == [
        (i, "function", {"name": "weather", "arguments": ""}) for i in range(2)
    ]
    for index in range(2):
        first, *rest = [call for call in calls if call["index"] == index]
        assert "id" in first and all(set(call) == {"index", "function"} for call in rest)
        assert all(set(call["function"]) == {"arguments"} for call in rest)
        arguments = "".join(call["function"]["arguments"] for call in rest)
        assert json.loads(arguments) == json.loads((PARIS, ROME)[index])


def test_one_call_where_one_is_allowed(live: Live) -> None:
    body = asked("2", parallel_tool_calls=False)
    (choice,) = live.ask(CHAT, body).json["choices"]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    events = live.ask(CHAT, body | {"stream": True}).events
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}


@pytest.mark.parametrize("key", ["1", "4"])
@pytest.mark.parametrize(
    ("choice", "parallel"),
    [({"type": "function", "function": {"name": "measure"}}, True), ("required", False)],
    ids=["named", "required"],
)
def test_a_required_call_constrains_the_model(
    client: openai.OpenAI, key: str, choice: Any, parallel: bool
) -> None:
    model = client.models.list().data[0].id
    tools = [BOUND] if choice == "required" else [BOUND, WEATHER]
    fields = asked(key, tools=tools, tool_choice=choice, parallel_tool_calls=parallel, max_tokens=400)
    (answer,) = client.chat.completions.create(model=model, temperature=0, **fields).choices
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (called,) = answer.message.tool_calls
    assert called.function.name == "measure"
    arguments = json.loads(called.function.arguments)
    assert arguments["where"] in ("here", "there") and arguments["exact"] in (True, False)
    with client.chat.completions.stream(model=model, temperature=0, **fields) as stream:
        for _event in stream:
            pass
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls[0].function.arguments == called.function.arguments
    assert streamed.finish_reason == "tool_calls"


def test_malformed_calls_are_text(live: Live) -> None:
    (choice,) = live.ask(CHAT, asked("3")).json["choices"]
    assert choice["message"] == {"role": "assistant", "content": script(live, "3")}
    assert choice["finish_reason"] == "stop"
    events = live.ask(CHAT, asked("3", stream=True)).events
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == script(live, "3")


def test_without_tools_nothing_is_a_call(live: Live) -> None:
    """Nor with tool_choice none: the model does not even see them."""
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        (choice,) = live.ask(CHAT, asked("2", **fields)).json["choices"]
        assert choice["message"] == {"role": "assistant", "content": script(live, "2")}
    told = live.ask(CHAT, asked("1", tool_choice="none")).json["usage"]["prompt_tokens"]
    assert told < live.ask(CHAT, asked("1")).json["usage"]["prompt_tokens"]


def test_a_call_that_is_cut_off_is_no_end(live: Live) -> None:
    (choice,) = live.ask(CHAT, asked("1", max_tokens=10)).json["choices"]
    assert choice["finish_reason"] == "length"
    (begun,) = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(begun["function"]["arguments"])


def test_a_forced_call_that_is_cut_off_is_no_text(live: Live) -> None:
    for most in range(1, 30):
        body = asked("4", tools=[BOUND], tool_choice="required", max_tokens=most, temperature=0)
        (choice,) = live.ask(CHAT, body).json["choices"]
        if choice["finish_reason"] == "tool_calls":
            break
        assert not choice["message"]["content"] and choice["finish_reason"] == "length"
        events = live.ask(CHAT, body | {"stream": True}).events
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert not any(delta.get("content") for delta in deltas)
    assert most > 5


def test_the_template_gets_the_reasoning_effort(live: Live) -> None:
    def tokens(**fields: Any) -> int:
        count: int = live.ask(CHAT, asked("4", max_tokens=1, **fields)).json["usage"]["prompt_tokens"]
        return count

    assert tokens(reasoning_effort="low") == tokens() + len("low")
    own = {"reasoning_effort": "minimal"}
    assert tokens(reasoning_effort="low", chat_template_kwargs=own) == tokens() + len("minimal")


def test_fields_of_a_text_also_accompany_calls(live: Live) -> None:
    body = asked("2", return_token_ids=True, logprobs=True, n=2)
    whole = live.ask(CHAT, body).json
    events = live.ask(CHAT, body | {"stream": True}).events
    for choice in whole["choices"]:
        own = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert [t for c in own for t in c.get("token_ids", [])] == choice["token_ids"]
        tokens = [t for c in own for t in (c["logprobs"] or {"content": []})["content"]]
        assert [t["token"] for t in tokens] == [t["token"] for t in choice["logprobs"]["content"]]
        assert len(choice["message"]["tool_calls"]) == 2


def test_a_conversation_with_calls_is_rendered_by_the_template(live: Live) -> None:
    called = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    messages = [
        {"role": "user", "content": "Ask"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "4"}]},
    ]
    body = {"messages": messages, "tools": [WEATHER]}
    prompt = live.ask("/detokenize", {"tokens": live.ask("/tokenize", body).json["tokens"]}).json["prompt"]
    assert json.dumps(WEATHER) in prompt
    assert "[assistant]weather[('city', 'Paris'), ('days', 3)][tool]4[assistant]4" in prompt
    (choice,) = live.ask(CHAT, body).json["choices"]
    assert choice["message"]["content"] == "Sunny, and 21 °C." and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [UNREADABLE]}, "tools"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages"),
    ],
    ids=str,
)
def test_invalid_tools_are_named(live: Live, fields: dict[str, Any], param: str) -> None:
    answer = live.ask(CHAT, asked("1") | fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_template_variables_cannot_replace_the_chat(live: Live) -> None:
    answer = live.ask(CHAT, asked("1", chat_template_kwargs={"answer": 1, "self": 2}))
    assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
    assert answer.headers[IGNORED] == "chat_template_kwargs.answer, chat_template_kwargs.self"
    for name in ("messages", "tools", "bos_token", "tokenize"):
        answer = live.ask(CHAT, asked("1", chat_template_kwargs={name: []}))
        assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")
        assert f"{name} cannot be set" in answer.error["message"]
