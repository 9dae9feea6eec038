"""Thinking before an answer: its markers, and whether the prompt has opened it already."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, Self

from specdec.text.answers.events import ThinkingDelta
from specdec.text.answers.source import Reading, TextCursor, Waiting
from specdec.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """The markers around a model's thinking."""

    start: str
    end: str
    opened: bool = False
    """The prompt ends with the start marker: the answer begins within thinking."""

    def after(self, prompt: str) -> Self | None:
        """Return the format for an answer to this prompt; None if the prompt has already ended the thinking.

        Templates end the prompt with the start marker, with both markers (thinking switched off), or with
        neither: then the answer thinks if it begins with the start marker.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.end):
            return None
        return replace(self, opened=tail.endswith(self.start))


TAGS = ThinkingFormat("<think>", "</think>")
THINKING_FORMATS: Mapping[str, ThinkingFormat] = {
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "nemotron_v3", "kimi_k2", "glm45"), TAGS),
    "mistral": ThinkingFormat("[THINK]", "[/THINK]"),
    "seed_oss": ThinkingFormat("<seed:think>", "</seed:think>"),
}
"""By the names of vLLM's parsers. Detection picks the first whose end marker is in the chat template."""


def thinking_format(name: str, template: ChatTemplate) -> ThinkingFormat | None:
    """Return the format by name, or for `auto` by the chat template."""
    if name == "auto":
        formats = THINKING_FORMATS.values()
        return next((candidate for candidate in formats if candidate.end in template.source), None)
    return THINKING_FORMATS.get(name)


def read_thinking(source: TextCursor, form: ThinkingFormat) -> Reading[None]:
    """Parse the thinking before the answer, if any. Line breaks beside a marker belong to it."""
    yield from source.space()
    opening = yield from source.match(form.start)
    if not opening:
        rest = source.text[source.at :]
        if source.cut and rest and form.start.startswith(rest):
            source.take(len(source.text))  # no answer: the start was cut off
        source.at = 0
        if not form.opened:
            return
    yield from _pass_breaks(source)
    pending, end = "", None
    while end is None:
        piece, end = yield from source.chunk((form.end,))
        source.settle()
        complete = (pending + piece).rstrip("\n")
        pending = (pending + piece)[len(complete) :]
        if complete:
            yield ThinkingDelta(complete)
    yield from _pass_breaks(source)


def _pass_breaks(source: TextCursor) -> Waiting[None]:
    while (yield from source.match("\n")):
        pass
    source.settle()


class ThinkingPhase(Enum):
    """The phase of an output."""

    MAY_BEGIN = auto()
    """No text yet; the start marker may follow."""
    THINKING = auto()
    OVER = auto()
    """Thinking has ended, or there is none: the answer follows."""


class ThinkingState(NamedTuple):
    """The state of an output's thinking after a token."""

    phase: ThinkingPhase
    tail: tuple[str, ...] = ()
    """The last tokens' texts, as many as may belong to a marker."""
    spent: int = 0
    """Thinking tokens so far, including a partial end marker's."""


OVER = ThinkingState(ThinkingPhase.OVER)


def overruns(end: str, spelled: Iterable[str]) -> dict[str, list[int]]:
    """Return the tokens that complete the end marker and extend beyond it, by the marker's preceding prefix.

    Line breaks after the end belong to it.
    """
    tokens_by_prefix: dict[str, list[int]] = {end[:at]: [] for at in range(len(end))}
    rests = tuple(end[at:] for at in range(1, len(end)))
    for token, text in enumerate(spelled):
        if end in text and text.partition(end)[2].strip("\n"):
            tokens_by_prefix[""].append(token)
        if text.startswith(rests):
            for at in range(1, len(end)):
                if text.startswith(end[at:]) and text[len(end) - at :].strip("\n"):
                    tokens_by_prefix[end[:at]].append(token)
    return {prefix: tokens for prefix, tokens in tokens_by_prefix.items() if tokens}


class ThinkingTrack:
    """Track where thinking begins and ends in an output's tokens. Markers may span tokens."""

    def __init__(self, start: str, end: str, spell: Callable[[int], str], *, opened: bool) -> None:
        self._start, self._end, self._spell = start, end, spell
        self.first = ThinkingState(ThinkingPhase.THINKING if opened else ThinkingPhase.MAY_BEGIN)

    def after(self, state: ThinkingState, token: int) -> ThinkingState:
        """Return the state after one more token."""
        if state.phase == ThinkingPhase.OVER:
            return state
        tail = (*state.tail, self._spell(token))
        text = "".join(tail)
        if state.phase == ThinkingPhase.MAY_BEGIN:
            stripped = text.lstrip()
            if self._start.startswith(stripped):
                is_whole = stripped == self._start
                return (
                    ThinkingState(ThinkingPhase.THINKING)
                    if is_whole
                    else ThinkingState(ThinkingPhase.MAY_BEGIN, tail)
                )
            if not stripped.startswith(self._start):
                return OVER
            text = stripped[len(self._start) :]
            tail = (text,)
        spent = state.spent + 1
        if (begin := text.find(self._end)) >= 0:
            return OVER._replace(spent=spent - len(_last(tail, len(text) - begin)))
        matched = max(at for at in range(len(self._end)) if text.endswith(self._end[:at]))
        return ThinkingState(ThinkingPhase.THINKING, _last(tail, matched), spent)


def _last(pieces: tuple[str, ...], length: int) -> tuple[str, ...]:
    """Return the fewest last pieces that hold this many characters."""
    at = len(pieces)
    while length > 0:
        at -= 1
        length -= len(pieces[at])
    return pieces[at:]
