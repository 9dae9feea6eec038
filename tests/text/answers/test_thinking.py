"""Reasoning before an answer is parsed independent of how its text is split into pieces."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from specdec.text.answers.calls import ToolCallReader
from specdec.text.answers.events import CallStart, TextDelta, ThinkingDelta
from specdec.text.answers.formats import CALL_FORMATS
from specdec.text.answers.hermes import Hermes
from specdec.text.answers.reader import AnswerReader
from specdec.text.answers.thinking import TAGS, THINKING_FORMATS, ThinkingFormat, thinking_format
from specdec.text.chat_template import ChatTemplate
from tests.text.answers.test_calls import SCHEMAS, call, pieces_of

OPENED = TAGS.after("<think>\n")
CALL = call('{"s": 1}')
Found = tuple[str, str, int]


def read(
    form: ThinkingFormat | None, pieces: Sequence[str], *, cut: bool = False, calls: str = "hermes"
) -> Found:
    """Parse an answer in pieces: return its reasoning, its content, and its number of calls."""
    reader = AnswerReader(form, ToolCallReader(CALL_FORMATS[calls], SCHEMAS))
    events = [event for piece in pieces for event in reader.push(piece)] + reader.finish(cut=cut)
    thought = "".join(event.text for event in events if isinstance(event, ThinkingDelta))
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    return thought, said, sum(isinstance(event, CallStart) for event in events)


CASES: dict[str, tuple[ThinkingFormat | None, str, Found]] = {
    "opened by the prompt": (OPENED, "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.", 0)),
    "opened by the answer": (TAGS, "<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.", 0)),
    "opened by both": (OPENED, "<think>Hm.</think>Yes.", ("Hm.", "Yes.", 0)),
    "space before the start": (TAGS, " \n<think>Hm.</think> Yes.", ("Hm.", " Yes.", 0)),
    "no thinking": (TAGS, "\n Yes. <think>", ("", "\n Yes. <think>", 0)),
    "an end without a start": (TAGS, "Hm.</think>Yes.", ("", "Hm.</think>Yes.", 0)),
    "switched off": (TAGS.after("<think>\n\n</think>\n\n"), "<think>Yes.", ("", "<think>Yes.", 0)),
    "nothing thought": (OPENED, "\n</think>\n\nYes.", ("", "Yes.", 0)),
    "nothing said": (OPENED, "Hm.\n</think>\n", ("Hm.", "", 0)),
    "nothing": (OPENED, "", ("", "", 0)),
    "broken off": (OPENED, "\nHm,\n\n  then\n", ("Hm,\n\n  then", "", 0)),
    "other tags": (OPENED, "a < b </thin <think></t>\n</think>", ("a < b </thin <think></t>", "", 0)),
    "a second end": (OPENED, "Hm.</think>\n</think> x", ("Hm.", "</think> x", 0)),
    "lines as they were": (OPENED, "\n\n  a\n\n\nb \n\n</think>\n\n    c\n", ("  a\n\n\nb ", "    c\n", 0)),
    "a call": (OPENED, f"Hm.\n</think>\n\n{CALL}", ("Hm.", "", 1)),
    "a call after text": (TAGS, f"<think>Hm.</think>I look.\n{CALL}", ("Hm.", "I look.", 1)),
    "a call in thinking": (OPENED, f"I may say\n{CALL}\n</think>No.", (f"I may say\n{CALL}", "No.", 0)),
    "in brackets": (THINKING_FORMATS["mistral"], "[THINK]Hm. [/THINK]Yes.", ("Hm. ", "Yes.", 0)),
}  # fmt: skip
WORDS = ["<think>", "</think>", "<thi", "nk>", "</", "<", "\n", " ", "text", "é", "<tool_call>", CALL, "{"]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_read(name: str) -> None:
    form, text, wanted = CASES[name]
    assert read(form, [text]) == wanted


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cut", [False, True])
def test_how_a_text_is_cut_changes_nothing(name: str, cut: bool) -> None:
    form, text, _ = CASES[name]
    rng = random.Random(name)
    for length in range(len(text) + 1):
        wanted = read(form, [text[:length]], cut=cut)
        assert read(form, list(text[:length]), cut=cut) == wanted
        assert read(form, pieces_of(text[:length], rng), cut=cut) == wanted
    for at in range(len(text) + 1):
        assert read(form, [text[:at], text[at:]], cut=cut) == wanted


@given(
    some.lists(some.sampled_from(WORDS), max_size=20),
    some.booleans(),
    some.sampled_from([None, TAGS, OPENED]),
)
def test_no_text_breaks_a_reader(words: list[str], cut: bool, form: ThinkingFormat | None) -> None:
    text = "".join(words)
    wanted = read(form, [text], cut=cut)
    for pieces in (words, list(text), pieces_of(text, random.Random(text))):
        assert read(form, pieces, cut=cut) == wanted


@pytest.mark.parametrize("name", CASES)
def test_text_truncated_within_thinking_is_no_answer(name: str) -> None:
    """Nor is a part of the end tag reasoning if `max_tokens` cut it."""
    form, text, (thought, _, _) = CASES[name]
    end = text.find(form.end) if form and (form.opened or form.start in text) else -1
    for length in range(max(end, 0)):
        own, said, calls = read(form, [text[:length]], cut=True)
        assert thought.startswith(own) and not calls
        assert not said.strip()


def test_thinking_comes_as_it_is_written() -> None:
    reader = AnswerReader(OPENED, ToolCallReader(Hermes(), SCHEMAS))
    for sign in "Hm, so":
        assert reader.push(sign) == [ThinkingDelta(sign)]
    assert reader.push("\n</thi") == [] and reader.push("nk>\n\nYe") == [TextDelta("Ye")]


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        ("<｜Assistant｜><think>", True),
        ("<｜Assistant｜></think>", None),
        ("<|im_start|>assistant\n<think></think>", None),
        ("user: <think> or </think>?\nassistant:", False),
    ],
)
def test_the_prompt_determines_whether_thinking_has_started(prompt: str, opened: bool | None) -> None:
    form = TAGS.after(prompt)
    assert (form and form.opened) == opened


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("auto", "{{ '<think>\\n' }} … split('</think>')", TAGS),
        ("auto", "[THINK]…[/THINK]", THINKING_FORMATS["mistral"]),
        ("auto", "hello", None),
        ("auto", None, None),
        ("none", "<think></think>", None),
        ("qwen3", "hello", TAGS),
    ],
)
def test_the_thinking_format_comes_from_the_template_or_the_setting(
    name: str, source: str | None, found: ThinkingFormat | None
) -> None:
    assert thinking_format(name, ChatTemplate(source, {}, where=Path("folder"))) == found
