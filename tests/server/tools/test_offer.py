"""Detection of a model's call format, and the errors without one."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.core.outputs import Delta
from specdec.server.chat_answer import ChatAnswer
from specdec.server.events import ExpectedContent
from specdec.server.failures import Failure
from specdec.server.tools.bodies import NamedFunction, NamedTool, Tool, ToolCall
from specdec.server.tools.offer import ToolOffer, make_offer
from specdec.text.answers.formats import CALL_FORMATS, call_format
from specdec.text.answers.hermes import Hermes
from specdec.text.chat_template import ChatTemplate
from specdec.text.grammar.child import Vocabulary
from tests.text.answers.test_calls import block, element, invoke, read, written
from tests.text.grammars import accepts

TOOL = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": {"default": None}}})
OTHER = Tool.model_validate({"type": "function", "function": {"name": "g"}})


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, {}, where=Path("folder"))


@pytest.mark.parametrize(
    ("setting", "source", "name"),
    [
        ("auto", "write <tool_call>{...}</tool_call>", "hermes"),
        ("auto", "write <tool_call><function=name>", "qwen3_coder"),
        ("auto", "write what you like", None),
        ("auto", None, None),
        ("none", "write <tool_call>", None),
        ("hermes", "write <function=name>", "hermes"),
        ("qwen3_coder", "write what you like", "qwen3_coder"),
        ("auto", "<TOOLCALL>[{...}]</TOOLCALL>", "nemotron_json"),
        ("auto", "<|tool_call|>[{...}]", "granite"),
        ("auto", "[TOOL_CALLS]f[ARGS]", "mistral"),
        ("auto", "[TOOL_CALLS] [", "mistral_v3"),
        ("auto", "<|python_tag|> … dictionary of argument name and its value}", "llama3_json"),
        ("auto", "<|tool_calls_section_begin|>", "kimi_k2"),
        ("auto", "'<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json'", "deepseek_v3"),
        ("auto", "tool['function']['name'] + '<｜tool▁sep｜>'", "deepseek_v31"),
        ("auto", "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls>", "deepseek_v32"),
        ("hermes", None, None),
    ],
)
def test_the_call_format_comes_from_the_template_or_the_setting(
    setting: str, source: str | None, name: str | None
) -> None:
    assert call_format(setting, template(source)) is (CALL_FORMATS[name] if name else None)


def test_no_tools_means_no_offer() -> None:
    for tools, choice in (([], "auto"), (None, None), ([TOOL], "none"), (None, "none")):
        assert make_offer(tools, choice, parallel=True, form=None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tools", "choice", "form", "param", "says"),
    [
        ([TOOL], None, None, "tools", "--tool-call-parser"),
        (
            [TOOL],
            NamedTool(type="function", function=NamedFunction(name="g")),
            Hermes(),
            "tool_choice",
            "none of the tools",
        ),
        ([], "required", Hermes(), "tool_choice", "no tools"),
        ([TOOL, OTHER, TOOL], "auto", Hermes(), "tools", "more than one is named 'f'"),
        ([TOOL, TOOL], "none", None, "tools", "more than one is named 'f'"),
    ],
)
def test_unsupported_tool_choices_are_refused(
    tools: Any, choice: Any, form: Any, param: str, says: str
) -> None:
    with pytest.raises(Failure, match=says) as caught:
        make_offer(tools, choice, parallel=True, form=form)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_forced_answer_is_calls_and_nothing_else(name: str, vocabulary: Vocabulary) -> None:
    """Everything that the grammar accepts parses as calls."""
    parameters = {"properties": {"s": {"type": "string"}, "i": {"type": "integer"}}, "required": ["i"]}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": own, "parameters": parameters}})
        for own in ("f", "g")
    ]
    first, second, bad = ("f", {"s": "é", "i": 3}), ("g", {"i": 3}), said(name, ("f", {"s": "é"}))
    one, two, both = said(name, first), said(name, second), said(name, first, second)
    for choice, parallel, fits in (
        ("required", True, [one, two, both]),
        ("required", False, [one, two]),
        (NamedTool(type="function", function=NamedFunction(name="f")), True, [one]),
    ):
        offer = make_offer(tools, choice, parallel=parallel, form=CALL_FORMATS[name])
        assert offer and offer.structure
        source = offer.structure.source
        for text in (one, two, both, "", "text", f"text {one}", f"{one} text", bad):
            assert accepts(vocabulary, "structural_tag", source, text) == (text in fits), (choice, text)
        more = re.sub(r"(?<=[:>])\s?(?=3)", "  ", one)
        assert not accepts(vocabulary, "structural_tag", source, more), "more than one blank"
        for text in fits:
            content, calls = read(CALL_FORMATS[name], [text])
            assert not content and len(calls) == 1 + (text == both)
            assert all(int(json.loads(arguments)["i"]) == 3 for _, arguments in calls)


def _attributed(own: tuple[str, Any]) -> tuple[str, str, str]:
    key, value = own
    return (key, "true", value) if isinstance(value, str) else (key, "false", json.dumps(value))


def said(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Format calls as a model does."""
    if name == "qwen3_coder":
        return "\n".join(element(*((k, str(v)) for k, v in own.items()), name=f) for f, own in calls)
    if name == "deepseek_v32":
        return block(*(invoke(*map(_attributed, own.items()), name=f) for f, own in calls))
    texts = [(function, json.dumps(own, ensure_ascii=False)) for function, own in calls]
    return written(CALL_FORMATS[name], *texts)


ARGUMENTS = '{"s": "<é>", "i": 123}'


def forced(name: str) -> tuple[ToolOffer, str]:
    """Return an offer that requires calls, and an answer with two."""
    parameters = {"properties": {"s": {"type": "string"}, "i": {"type": "integer"}}}
    functions = [{"name": own, "parameters": parameters} for own in ("f", "g")]
    tools = [Tool.model_validate({"type": "function", "function": function}) for function in functions]
    offer = make_offer(tools, "required", parallel=True, form=CALL_FORMATS[name])
    assert offer and offer.structure
    own = json.loads(ARGUMENTS)
    return offer, said(name, ("f", own), ("g", own))


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_truncated_required_call_has_only_complete_values(name: str) -> None:
    """Whole and streamed, cut anywhere: half a tag is no text, and half a number no number."""
    offer, text = forced(name)
    for at in range(len(text) + 1):
        last = Delta("", (), finish_reason="length")
        message = ChatAnswer(ExpectedContent(offer=offer)).message(replace(last, text=text[:at]))
        calls = message.get("tool_calls", [])
        assert not message["content"]
        assert [call["function"]["name"] for call in calls] == ["f", "g"][: len(calls)]
        for own in calls:
            arguments = own["function"]["arguments"]
            assert ARGUMENTS.startswith(arguments)
            assert name != "qwen3_coder" or "1" not in arguments or "123" in arguments
        streamed = ChatAnswer(ExpectedContent(offer=offer))
        parts = [part for sign in text[:at] for part in streamed.parts(Delta(sign, ()))]
        parts += streamed.parts(last)
        assert not any(part.get("content") for part in parts)
        pieces = [own["function"]["arguments"] for part in parts for own in part["tool_calls"]]
        assert "".join(pieces) == "".join(call["function"]["arguments"] for call in calls)
    assert len(calls) == 2


def test_tools_reach_the_template_unchanged() -> None:
    offer = make_offer([TOOL], "auto", parallel=True, form=Hermes())
    assert offer and offer.plain == [
        {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
    ]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"a": null}', {"a": None}),
        ({"a": None}, {"a": None}),
        ("", {}),
        (None, {}),
        ("[1]", "[1]"),
        ('{"a": ', '{"a": '),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_arguments_are_objects_for_a_template_wherever_they_are(given: Any, read: Any) -> None:
    called = ToolCall.model_validate(
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": given}}
    )
    assert called.plain == {"id": "x", "type": "function", "function": {"name": "f", "arguments": read}}
