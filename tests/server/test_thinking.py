"""A thinking model over HTTP: what the official client parses, and what a request may set."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specdec.errors import ConfigError
from specdec.server.fields import IGNORED
from specdec.server.settings import ServerConfig
from specdec.text.answers.formats import CALL_FORMATS
from specdec.text.answers.thinking import THINKING_FORMATS
from specdec.text.tokenizer import SPOKEN
from tests.server.live import Live
from tests.server.tools.scripted import write_scripted
from tests.server.tools.test_calls import CHAT, PARIS, WEATHER
from tests.text.answers.test_calls import call

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is not defined %}[assistant]{{ messages[-1].content[-1:] }}"
    "{% elif enable_thinking %}[assistant]<think>{% else %}[assistant]<think></think>{% endif %}"
)
THOUGHT = "The weather,\n\n  or <tool> of it"
SAID = "I look."
SCRIPTS = {
    "1": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{call(PARIS, 'weather')}",
    "4": "Sunny, and 21 °C.",
}
MODES: dict[str, dict[str, Any]] = {
    "the answer opens it": {},
    "the prompt opens it": {"enable_thinking": True},
    "by an effort": {"reasoning_effort": "high"},
}
OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("scripted") / "thinking"
    write_scripted(folder, SCRIPTS, TEMPLATE, tags="1")
    with Live("--no-adaptive", model=str(folder)) as own:  # whether drafts pay here depends on the machine
        yield own


def asked(key: str = "1", **fields: Any) -> dict[str, Any]:
    own = {"messages": [{"role": "user", "content": f"Ask {key}"}], "tools": [WEATHER], "temperature": 0}
    return own | fields


def message(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    """Return a whole answer's message, checking that its stream agrees."""
    (choice,) = live.ask(CHAT, body).json["choices"]
    found: dict[str, Any] = choice["message"]
    streamed: dict[str, str] = {}
    for event in live.ask(CHAT, body | {"stream": True}).events:
        for own in event["choices"]:
            for name in ("content", "reasoning_content", "reasoning"):
                streamed[name] = streamed.get(name, "") + own["delta"].get(name, "")
    assert streamed == {name: found.get(name) or "" for name in streamed}
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_official_client_reads_thinking_text_and_calls(live: Live, mode: str) -> None:
    """The second time from drafts, which extend beyond the end of thinking."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        for _ in range(2):
            fields = asked(extra_body=MODES[mode], model="thinking")
            answer = client.chat.completions.create(**fields)
            (choice,) = answer.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", SAID)
            assert choice.message.reasoning_content == choice.message.reasoning == THOUGHT
            (called,) = choice.message.tool_calls
            assert json.loads(called.function.arguments) == json.loads(PARIS)
            thought, said = "", ""
            for chunk in client.chat.completions.create(**fields, stream=True):
                delta = chunk.choices[0].delta
                thought += getattr(delta, "reasoning_content", "") or ""
                assert not (delta.content and not thought.endswith(THOUGHT)), "thinking comes first"
                said += delta.content or ""
            assert (thought, said) == (THOUGHT, SAID)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens


@pytest.mark.parametrize("fields", OFF, ids=str)
def test_thinking_is_switched_off(live: Live, fields: dict[str, Any]) -> None:
    own = message(live, asked(**fields))
    assert (own["content"].strip(), len(own["tool_calls"])) == (SAID, 1) and "reasoning_content" not in own


def test_thinking_is_omitted_on_request(live: Live) -> None:
    own = message(live, asked(include_reasoning=False))
    assert (own["content"], len(own["tool_calls"])) == (SAID, 1) and "reasoning_content" not in own
    answer = live.ask(CHAT, asked(include_reasoning=False, max_tokens=3)).json
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": None}


def test_an_answer_truncated_within_thinking_is_empty(live: Live) -> None:
    """All tokens are counted except those of the end marker."""
    whole = live.ask(CHAT, asked(enable_thinking=True)).json["usage"]
    thought = whole["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thought < whole["completion_tokens"]
    for most in range(1, thought + 1):
        body = asked(enable_thinking=True, max_tokens=most)
        answer = live.ask(CHAT, body).json
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
        assert THOUGHT.startswith(choice["message"].get("reasoning_content", ""))
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == most
    assert message(live, body)["reasoning_content"] == THOUGHT
    assert live.ask(CHAT, asked("4")).json["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "max_thinking_tokens"])
def test_a_budget_ends_thinking_and_the_answer_continues(live: Live, name: str) -> None:
    for budget, mode in ((0, {}), (3, {"enable_thinking": True}), (1000, {})):
        body = asked(**{name: budget}, **mode)
        for speculate in (False, True):
            answer = live.ask(CHAT, body | {"speculate": speculate}).json
            own = answer["choices"][0]["message"]
            spent = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert (own["content"], len(own["tool_calls"])) == (SAID, 1)
            assert THOUGHT.startswith(own.get("reasoning_content", ""))
            assert spent == budget or (budget == 1000 and own["reasoning_content"] == THOUGHT)


@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_starts_after_thinking(live: Live, mode: str) -> None:
    body = asked(tools=None, structured_outputs={"regex": "(yes|no), [0-9]{3}"}, **MODES[mode])
    plain = message(live, body | {"speculate": False})
    assert plain["reasoning_content"] == THOUGHT and message(live, body) == plain
    answer, number = plain["content"].split(", ")
    assert answer in ("yes", "no") and len(number) == 3 and number.isdigit()
    off = message(live, body | {"enable_thinking": False, "reasoning_effort": None})
    assert off["content"] and "reasoning_content" not in off
    with_calls = message(live, asked(tool_choice="required", **MODES[mode]))
    assert with_calls["reasoning_content"] == THOUGHT and not with_calls["content"]
    assert json.loads(with_calls["tool_calls"][0]["function"]["arguments"])["city"]


def test_features_missing_in_the_template_are_named(live: Live) -> None:
    """A chat without thinking has no budget; a template without a switch cannot switch thinking."""
    fields = {"enable_thinking": False, "thinking_budget": 3}
    assert live.ask(CHAT, asked(**fields)).headers[IGNORED] == "thinking_budget"
    assert IGNORED not in live.ask(CHAT, asked(thinking_budget=3, reasoning_effort="low")).headers
    answer = live.ask(CHAT, asked(thinking_budget=3, max_thinking_tokens=4))
    assert (answer.status, answer.error["param"]) == (400, "max_thinking_tokens")


def test_earlier_thinking_is_passed_to_the_template(live: Live) -> None:
    for thought in ({"reasoning_content": "so"}, {"reasoning": "so"}, {"reasoning_content": ""}, {}):
        messages = [{"role": "assistant", "content": "Yes.", **thought}, {"role": "user", "content": "4"}]
        ids = live.ask("/tokenize", {"messages": messages}).json["tokens"]
        prompt = live.ask("/detokenize", {"tokens": ids}).json["prompt"]
        said = "(so)Yes." if "so" in thought.values() else "Yes."
        assert prompt == f"[assistant]{said}[user]4[assistant]4"


def test_a_server_has_defaults_and_knows_a_template_without_a_switch(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("scripted") / "plain"
    write_scripted(folder, SCRIPTS, TEMPLATE.replace("enable_thinking", "loud"), tags="1")
    options = ("--chat-template-kwargs", '{"loud": true}', "--reasoning-parser", "none")
    with Live(*options, model=str(folder)) as own:
        answer = own.ask(CHAT, asked(enable_thinking=False, reasoning_effort="low", tools=None))
        assert answer.headers[IGNORED] == "reasoning_effort, enable_thinking"
        (choice,) = answer.json["choices"]
        assert choice["message"] == {"role": "assistant", "content": SCRIPTS["1"].removeprefix("<think>")}
        ids = own.ask("/tokenize", {"messages": [{"role": "user", "content": "4"}]}).json["tokens"]
        assert own.ask("/detokenize", {"tokens": ids}).json["prompt"].endswith("[assistant]<think>")


def test_settings_and_tokenizers_know_every_format() -> None:
    named = ServerConfig.model_fields
    formats = (("tool_call_parser", CALL_FORMATS), ("reasoning_parser", THINKING_FORMATS))
    for field, known in formats:
        assert {"auto", "none", *known} == {*named[field].annotation.__args__}  # type: ignore[union-attr]
    markers = {text for form in THINKING_FORMATS.values() for text in (form.start, form.end)}
    markers |= {text for form in CALL_FORMATS.values() for text in form.openings if len(text) > 1}
    plain = {"<function=", "<｜DSML｜function_calls>"}  # these take several tokens, or are not special
    assert markers - plain <= SPOKEN and "｜DSML｜" in SPOKEN
    for bad in ("{", "[1]", "3"):
        with pytest.raises(ConfigError, match="chat_template_kwargs"):
            ServerConfig(chat_template_kwargs=bad)
