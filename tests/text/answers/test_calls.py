"""Model output is parsed into content and calls, independent of how its text is split into pieces."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from specdec.text.answers import source
from specdec.text.answers.calls import MOST_REREAD, CallFormat, ToolCallReader
from specdec.text.answers.events import ArgumentsDelta, CallStart, TextDelta
from specdec.text.answers.formats import CALL_FORMATS
from specdec.text.answers.hermes import Hermes
from specdec.text.answers.qwen3_coder import Qwen3Coder
from specdec.text.answers.reader import AnswerReader
from specdec.text.answers.source import TextCursor, Waiting

HERMES, CODER = Hermes(), Qwen3Coder()
NEMOTRON, GRANITE, MISTRAL, LLAMA, KIMI = map(
    CALL_FORMATS.__getitem__, ("nemotron_json", "granite", "mistral", "llama3_json", "kimi_k2")
)
V3, V31, DSML = map(CALL_FORMATS.__getitem__, ("deepseek_v3", "deepseek_v31", "deepseek_v32"))
OPEN, CLOSE = "<tool_call>", "</tool_call>"
SCHEMAS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "b": {"type": "boolean"},
            "o": {"$ref": "#/$defs/Box"},
            "a": {"items": {"type": "string"}},
            "n": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "sn": {"type": ["string", "null"]},
            "e": {"enum": [1, 2]},
        },
        "$defs": {"Box": {"type": "object"}},
    }
}

Found = tuple[str, list[tuple[str, str]]]


def read(form: CallFormat, pieces: Sequence[str], *, cut: bool = False) -> Found:
    """Parse an answer in pieces: return its content, and each call's name and arguments."""
    parser = AnswerReader(calls=ToolCallReader(form, SCHEMAS))
    content, calls = "", list[tuple[str, str]]()
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish(cut=cut)
    for event in events:
        match event:
            case TextDelta(text):
                content += text
            case CallStart(name):
                calls.append((name, ""))
            case ArgumentsDelta(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


def call(arguments: str, name: str = "f") -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


def element(*parameters: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"{OPEN}\n<function={name}>\n{inner}</function>\n{CLOSE}"


def written(form: CallFormat, *calls: tuple[str, str]) -> str:
    """Format calls as forced output does: each with its name and JSON arguments."""
    own = [form.frame(name)[0] + arguments + form.frame(name)[1] for name, arguments in calls]
    return form.before + form.between.join(own) + form.behind


def invoke(*parameters: tuple[str, str, str], name: str = "f") -> str:
    inner = "".join(
        f'<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>\n'
        for key, text, value in parameters
    )
    return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'


def block(*invokes: str) -> str:
    return f"<｜DSML｜function_calls>\n{''.join(invokes)}</｜DSML｜function_calls>"


AWKWARD = '{"a": "say \\"}</tool_call>\\" \\\\", "b": [1, {"c": "{"}], "é": null}'
CASES: dict[str, tuple[CallFormat, str, Found]] = {
    "no call": (HERMES, " Hello <b>x</b> <tool> \n", (" Hello <b>x</b> <tool> \n", [])),
    "nothing": (HERMES, "", ("", [])),
    "space alone": (HERMES, "\n\n", ("\n\n", [])),
    "one": (HERMES, call('{"a": 1}'), ("", [("f", '{"a": 1}')])),
    "no space at all": (HERMES, call("{}").replace("\n", "").replace(": ", ":"), ("", [("f", "{}")])),
    "text before": (HERMES, f"I look.\n\n{call('{}')}\n", ("I look.", [("f", "{}")])),
    "text behind": (HERMES, f"A\n{call('{}')}\nB", ("A\nB", [("f", "{}")])),
    "two": (HERMES, f"{call('{}')}\n{call('{ }', 'g')}", ("", [("f", "{}"), ("g", "{ }")])),
    "tags in a string": (HERMES, call(AWKWARD), ("", [("f", AWKWARD)])),
    "arguments first": (
        HERMES,
        f'{OPEN}{{"arguments": {AWKWARD}, "name": "f"}}{CLOSE}',
        ("", [("f", AWKWARD)]),
    ),
    "arguments as a string": (HERMES, call('"{\\"a\\": 1}"'), ("", [("f", '{"a": 1}')])),
    "null for none": (HERMES, call("null"), ("", [("f", "{}")])),
    "no arguments": (HERMES, f'{OPEN}{{"name": "f"}}{CLOSE}', ("", [("f", "{}")])),
    "no last brace": (HERMES, f'{OPEN}{{"name": "f", "arguments": {{}}\n{CLOSE}', ("", [("f", "{}")])),
    "no end": (HERMES, f'{OPEN}{{"name": "f", "arguments": {{"a": "', ("", [("f", '{"a": "')])),
    "no closing tag": (HERMES, call("{}").removesuffix(CLOSE), ("", [("f", "{}")])),
    "closed within its arguments": (HERMES, call('{"a": [1, <'), ("", [("f", '{"a": [1, <}\n')])),
    "a tag is opened twice": (HERMES, f"{OPEN}\n{call('{}')}", (OPEN, [("f", "{}")])),
    "half a tag": (HERMES, "x <tool_ca", ("x <tool_ca", [])),
    "elements": (CODER, element(("s", "x\ny"), ("i", "3")), ("", [("f", '{"s": "x\\ny", "i": 3}')])),
    "no parameters": (CODER, element(), ("", [("f", "{}")])),
    "an empty text": (CODER, element(("s", "")), ("", [("f", '{"s": ""}')])),
    "no outer tags": (CODER, f"A\n{element()[12:-12]}\n", ("A", [("f", "{}")])),
    "two in one": (CODER, OPEN + element()[12:-12] * 2 + CLOSE, ("", [("f", "{}")] * 2)),
    "text around": (CODER, f"A {element(('s', 'x'))} B", ("A B", [("f", '{"s": "x"}')])),
    "a value's end is missing": (
        CODER,
        element(("i", "1"), ("s", "x")).replace("x\n</parameter>\n", "x\n"),
        ("", [("f", '{"i": 1, "s": "x"}')]),
    ),
    "tags in a value": (
        CODER,
        element(("s", f"<parameter=a>{OPEN}</function>\n{CLOSE[:-1]}")),
        ("", [("f", json.dumps({"s": f"<parameter=a>{OPEN}</function>\n{CLOSE[:-1]}"}))]),
    ),
    "JSON instead": (CODER, f"{OPEN}\n<function=f>\n{AWKWARD}\n</function>\n{CLOSE}", ("", [("f", AWKWARD)])),
    "a bad key": (
        CODER,
        f"{OPEN}<function=f><parameter=s>x</parameter><parameter=\nt>",
        ("<parameter=\nt>", [("f", '{"s": "x"}')]),
    ),
    "a list": (
        NEMOTRON,
        f'A\n<TOOLCALL>[{{"name": "f", "arguments": {AWKWARD}}}, '
        '{"name": "g", "arguments": {}}]</TOOLCALL>\nB',
        ("A\nB", [("f", AWKWARD), ("g", "{}")]),
    ),
    "a list with ids": (
        NEMOTRON,
        '<TOOLCALL>[{"name": "f", "arguments": {}, "id": "x1"},'
        '{"arguments": {"a": 1}, "name": "g"}]</TOOLCALL>',
        ("", [("f", "{}"), ("g", '{"a": 1}')]),
    ),
    "a list that goes on with text": (
        NEMOTRON,
        '<TOOLCALL>[{"name": "f", "arguments": {}}, and so on]</TOOLCALL>',
        (", and so on]</TOOLCALL>", [("f", "{}")]),
    ),
    "no list": (NEMOTRON, "<TOOLCALL>[]</TOOLCALL>", ("<TOOLCALL>[]</TOOLCALL>", [])),
    "Granite's": (GRANITE, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', ("", [("f", '{"a": 1}')])),
    "Granite's as a tag": (GRANITE, '<tool_call>[{"name": "f", "arguments": {}}]', ("", [("f", "{}")])),
    "Mistral's": (
        MISTRAL,
        f"I look.[TOOL_CALLS]f[ARGS]{AWKWARD}[TOOL_CALLS]g-2[CALL_ID]a1[ARGS]{{}}",
        ("I look.", [("f", AWKWARD), ("g-2", "{}")]),
    ),
    "Mistral's without marks": (MISTRAL, '[TOOL_CALLS]f{"a": [1]}', ("", [("f", '{"a": [1]}')])),
    "Mistral's as a list": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        ("", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "Llama's": (
        LLAMA,
        f'{{"name": "f", "parameters": {AWKWARD}}}; {{"name": "g", "parameters": {{}}}}',
        ("", [("f", AWKWARD), ("g", "{}")]),
    ),
    "Llama's behind a tag": (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', ("", [("f", "{}")])),
    "Llama's behind text": (
        LLAMA,
        'So: {"name": "f", "parameters": {}}',
        ('So: {"name": "f", "parameters": {}}', []),
    ),
    "JSON that is no call": (LLAMA, '{"name": "f", "age": 3}', ('{"name": "f", "age": 3}', [])),
    "Kimi's": (
        KIMI,
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        + AWKWARD
        + "<|tool_call_end|><|tool_call_begin|>g<|tool_call_argument_begin|>{}<|tool_call_end|>"
        + "<|tool_calls_section_end|>",
        ("I look.", [("f", AWKWARD), ("g", "{}")]),
    ),
    "no call of Kimi's": (KIMI, "<|tool_calls_section_begin|>x {}", ("<|tool_calls_section_begin|>x {}", [])),
    "no call of Mistral's": (MISTRAL, "[TOOL_CALLS]f [ARGS]{}", ("[TOOL_CALLS]f [ARGS]{}", [])),
    "DeepSeek V3's": (
        V3,
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        + AWKWARD
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```"
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("I look.", [("f", AWKWARD), ("g", "{}")]),
    ),
    "DeepSeek V3.1's": (
        V31,
        "I look.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        + AWKWARD
        + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("I look.", [("f", AWKWARD), ("g", "{}")]),
    ),
    "no call of DeepSeek's": (V31, "<｜tool▁calls▁begin｜>f {}", ("<｜tool▁calls▁begin｜>f {}", [])),
    "DeepSeek V3.2's": (
        DSML,
        "I look.\n\n"
        + block(invoke(("s", "true", ' "x"\n</b>'), ("i", "false", "[1, null]")), invoke(name="g")),
        ("I look.", [("f", json.dumps({"s": ' "x"\n</b>', "i": [1, None]})), ("g", "{}")]),
    ),
    "no JSON where it should be": (DSML, block(invoke(("i", "false", "one"))), ("", [("f", '{"i": "one"}')])),
    "no call of DeepSeek V3.2's": (DSML, block("x"), (block("x"), [])),
    "not closed": (CODER, f"{OPEN}<function=f><parameter=s>x", ("", [("f", '{"s": "x"}')])),
}  # fmt: skip
PARAMETER = "<parameter="
WORDS = [OPEN, CLOSE, "<function=", "f", ">", "</function>", "<parameter=", "s", "i", "</parameter>", "\n"]
WORDS += ["<TOOLCALL>", "[TOOL_CALLS]", "[ARGS]", "[", "]", ";", "<|tool_calls_section_begin|>"]
WORDS += ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", '{"name": "f", "']
WORDS += ['arguments": {}}', 'parameters": {}}']
WORDS += [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "```",
    "<｜DSML｜function_calls>",
]
WORDS += ["<｜DSML｜invoke", ' name="f"', "<｜DSML｜parameter", ' string="true"', "</｜DSML｜parameter>"]
WORDS += ['{"name"', ": ", '"f"', ', "arguments"', "{", "}", '"', "\\", "1", " ", "<", "text", "null", "é"]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_read(name: str) -> None:
    form, text, wanted = CASES[name]
    assert read(form, [text]) == wanted


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cut", [False, True])
def test_how_a_text_is_cut_changes_nothing(name: str, cut: bool) -> None:
    form, text, _ = CASES[name]
    wanted = read(form, [text], cut=cut)
    for at in range(len(text) + 1):
        assert read(form, [text[:at], text[at:]], cut=cut) == wanted
    assert read(form, list(text), cut=cut) == wanted
    rng = random.Random(name)
    for _ in range(20):
        assert read(form, pieces_of(text, rng), cut=cut) == wanted


@given(some.lists(some.sampled_from(WORDS), max_size=30), some.booleans(), some.sampled_from([*CALL_FORMATS]))
def test_no_text_breaks_a_parser(words: list[str], cut: bool, name: str) -> None:
    """Pieces of any size give the same result, and text that is no call is preserved."""
    text = "".join(words)
    wanted = read(CALL_FORMATS[name], [text], cut=cut)
    for pieces in (words, list(text), pieces_of(text, random.Random(text))):
        assert read(CALL_FORMATS[name], pieces, cut=cut) == wanted
    assert wanted[1] or wanted[0] == text


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no tag is waited for": lambda patch: patch.setattr(source, "overlap", lambda text, stop: 0),
    "what comes next is not waited for": lambda patch: patch.setattr(TextCursor, "sees", _sees_at_once),
    "names are not waited for": lambda patch: patch.setattr(source, "NAME_SO_FAR", re.compile("$^")),
    "keys are not waited for": lambda patch: patch.setattr(source, "STRING_SO_FAR", re.compile("$^")),
    "white space ends with the piece": lambda patch: patch.setattr(TextCursor, "space", _space_at_once),
}


def _sees_at_once(own: TextCursor, *literals: str) -> Waiting[str]:
    return next((literal for literal in literals if own.text.startswith(literal, own.at)), "")
    yield None


def _space_at_once(own: TextCursor) -> Waiting[None]:
    own.at = len(own.text) - len(own.text[own.at :].lstrip())
    return
    yield None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_parser_that_does_not_wait_is_detected(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    assert any(read(form, [text]) != read(form, list(text)) for form, text, _ in CASES.values())


def pieces_of(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 9)))
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "\n",
        "x",
        "[]",
        "{",
        "{}",
        '{"name": 3}',
        '{"name": ""}',
        '{"name": "f", }',
        "{'name': 'f'}",
        '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": "[1]"}',
        '{"arguments": {}}',
        '{"arguments": {, "name": "f"}',
        '{"name": "f", "parameters": {}}',
        '{"name": "f" "arguments": {}}',
        '{"name": "' + "f" * 300 + '", "arguments": {}}',
        '{"name": "f\\q", "arguments": {}}',
        "<function=>\n</function>",
        "<function=a b>\n</function>",
        "<function=f>text</function>",
        "<function=f",
    ],
)
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_malformed_calls_stay_text(name: str, inner: str) -> None:
    for text in (f"A\n{OPEN}{inner}{CLOSE} B", f"{OPEN}{inner}"):
        assert read(CALL_FORMATS[name], [text]) == read(CALL_FORMATS[name], list(text)) == (text, [])


def sent(form: CallFormat, text: str) -> Iterator[tuple[str, str]]:
    """Yield the text so far, character by character, and the content sent to the client."""
    parser, known = AnswerReader(calls=ToolCallReader(form, SCHEMAS)), ""
    for at, sign in enumerate(text, 1):
        known += "".join(event[0] for event in parser.push(sign))
        yield text[:at], known


def test_arguments_come_as_they_are_written() -> None:
    """Arguments are streamed before they end, except text that may be part of the end tag."""
    words = "word " * 20
    for form, text in (
        (HERMES, f"Hm. {call(json.dumps({'s': words}))}"),
        (CODER, f"Hm. {element(('s', words))}"),
        (DSML, f"Hm. {block(invoke(('s', 'true', words)))}"),
        (V31, f"Hm. {written(V31, ('f', json.dumps({'s': words})))}"),
    ):
        for come, known in sent(form, text):
            if 0 < come.count("word") < 20:
                assert known.count("word") >= come.count("word") - 1
            assert "<" not in known and "tool_call" not in known and "parameter" not in known
            assert known == "Hm.f"[: len(known)] or "{" in known


@pytest.mark.parametrize("form", CALL_FORMATS.values(), ids=CALL_FORMATS)
def test_a_frame_around_json_is_a_call(form: CallFormat) -> None:
    """Framed forced output parses as a call of this name, with that JSON."""
    assert read(form, [written(form, ("f", AWKWARD))]) == ("", [("f", AWKWARD)])
    assert read(form, [written(form, ("f", "{}"), ("g", "{ }"))]) == ("", [("f", "{}"), ("g", "{ }")])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "12", "12"),
        ("s", "null", "null"),
        ("s", ' a\t"b"\\ ', ' a\t"b"\\ '),
        ("i", "12", 12),
        ("i", "twelve", "twelve"),
        ("i", "NaN", "NaN"),
        ("i", "9" * 5000, "9" * 5000),
        ("i", "[" * 100_000, "[" * 100_000),
        ("b", "True", True),
        ("b", "false", False),
        ("b", "1", 1),
        ("o", '{"k": [1, null]}', {"k": [1, None]}),
        ("o", "{'k': 1}", "{'k': 1}"),
        ("a", '["x"]', ["x"]),
        ("n", "None", None),
        ("n", "1.5", 1.5),
        ("sn", "null", None),
        ("sn", "1", "1"),
        ("e", "2", 2),
        ("unknown", "2", "2"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_values_have_the_schemas_types(key: str, text: str, value: object) -> None:
    _, [(_, arguments)] = read(CODER, [element((key, text))])
    assert json.loads(arguments) == {key: value}


@pytest.mark.parametrize("key", ["s", "i"])
def test_a_value_that_was_cut_off_stays_open(key: str) -> None:
    """A client must not take half a file for a whole one, or half a number for another one."""
    text = f"{OPEN}<function=f><parameter={key}>\n12"
    whole = "\n</parameter>\n"
    for end in ("", "\n", "\n</para"):
        content, [(_, arguments)] = read(CODER, [text + end], cut=True)
        assert (content, arguments) == ("", '{"s": "12' if key == "s" else '{"i": ')
    for end in (whole.rstrip(), whole, f"{whole}<par", f"{whole}{PARAMETER}i"):
        content, [(_, arguments)] = read(CODER, [text + end], cut=True)
        assert (content, arguments) == ("", '{"s": "12"' if key == "s" else '{"i": 12')


@pytest.mark.parametrize("form", CALL_FORMATS.values(), ids=CALL_FORMATS)
def test_half_a_tag_within_a_call_is_no_text(form: CallFormat) -> None:
    begun = form.before + form.frame("f")[0]
    text = written(form, ("f", "{}"))
    for at in range(len(begun) + 1, len(text) + 1):
        assert read(form, [text[:at]], cut=True)[0] == ""
    assert read(form, [f"{begun}{{}}\n</tool"]) == ("\n</tool", [("f", "{}")])


@pytest.mark.parametrize("form", [V3, V31, DSML, KIMI], ids=["v3", "v31", "dsml", "kimi"])
def test_a_second_call_that_was_cut_off_before_its_name_is_left_out(form: CallFormat) -> None:
    text = written(form, ("f", "{}"), ("g", "{}"))
    for at in range(text.rindex("g"), text.index("{}") + 2, -1):
        assert read(form, [text[:at]], cut=True) == ("", [("f", "{}")])
    parameter = block(invoke(("s", "true", "x"), ("key", "true", "y")))
    for at in range(parameter.index("key"), parameter.rindex("<｜DSML｜parameter"), -1):
        assert read(DSML, [parameter[:at]], cut=True) == ("", [("f", '{"s": "x"')])


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 3},
        {"properties": {"k": 3}},
        {"properties": {"k": {"type": 3}}},
        {"properties": {"k": {"$ref": "#/$defs/k"}}, "$defs": {"k": {"$ref": "#/$defs/k"}}},
        {"properties": {"k": {"$ref": "elsewhere#/x"}}},
        {"properties": {"k": {"anyOf": 3, "enum": 4}}},
        {
            "properties": {"k": {"$ref": "#/$defs/0"}},
            "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(99)},
        },
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_no_schema_breaks_a_parser(schema: dict[str, Any]) -> None:
    parser = AnswerReader(calls=ToolCallReader(CODER, {"f": schema}))
    events = parser.push(element(("k", "1"))) + parser.finish(cut=False)
    assert "".join(event[0] for event in events) == 'f{"k": "1"}'


@pytest.mark.parametrize(
    ("form", "unit"), [(HERMES, f'{OPEN}{{"arguments": {{'), (MISTRAL, '[TOOL_CALLS][{"arguments":{')]
)
def test_rescanning_is_bounded(form: CallFormat, unit: str) -> None:
    """Each opening starts a value that never ends: rescanning the rest for each would be quadratic."""
    text = unit * 3000
    reader = AnswerReader(None, ToolCallReader(form, SCHEMAS))
    events = [*reader.push(text), *reader.finish(cut=False)]
    assert "".join(event[0] for event in events) == text and all(isinstance(own, TextDelta) for own in events)
    assert reader._source.reread <= MOST_REREAD + len(text)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_long_arguments_are_read_once(name: str) -> None:
    """Buffered text stays short while arguments arrive, so that each piece costs its own length."""
    form, piece = CALL_FORMATS[name], 64
    waits: list[int] = []
    for length in (1 << 12, 1 << 13):
        sent = json.dumps({"s": "é<\\\" '" * (length // 6)}, ensure_ascii=False)
        whole = (
            element(("s", json.loads(sent)["s"]))
            if form is CALL_FORMATS["qwen3_coder"]
            else written(form, ("f", sent))
        )
        reader, read = AnswerReader(calls=ToolCallReader(form, SCHEMAS)), 0
        events: list[Any] = []
        for start in range(0, len(whole), piece):
            events += reader.push(whole[start : start + piece])
            read += len(reader._source.text)
        events += reader.finish(cut=False)
        assert json.loads(
            "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
        ) == json.loads(sent)
        assert len(events) <= len(whole) // piece + 4
        waits.append(read)
    assert waits[1] <= 2.1 * waits[0] + piece, waits
