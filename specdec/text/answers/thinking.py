"""Thinking before an answer: the markers around it, and whether a prompt has opened it already."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, Self

from specdec.text.answers.events import Thinking
from specdec.text.answers.source import Reading, Source, Waiting
from specdec.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """The markers between which a model thinks before it answers."""

    start: str
    end: str
    opened: bool = False
    """The prompt ends behind the start: the answer begins within thinking."""

    def after(self, prompt: str) -> Self | None:
        """Return how an answer to this prompt thinks; None: the prompt has ended its thinking already.

        Templates put the start behind the prompt, or both markers where thinking is switched off, or neither:
        then the answer thinks if it begins with the start.
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
"""By the names that vLLM gives their parsers; the first whose end a chat template holds is the model's."""


def thinking_format(name: str, template: ChatTemplate) -> ThinkingFormat | None:
    """Find how a model thinks: by the name, or by its chat template if that is auto."""
    if name == "auto":
        known = THINKING_FORMATS.values()
        return next((own for own in known if own.end in template.source), None)
    return THINKING_FORMATS.get(name)


def read_thinking(source: Source, form: ThinkingFormat) -> Reading[None]:
    """Read what is thought before the answer, if anything is. Line breaks beside a marker belong to it."""
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
    held, end = "", None
    while end is None:
        piece, end = yield from source.chunk((form.end,))
        source.settle()
        said = (held + piece).rstrip("\n")
        held = (held + piece)[len(said) :]
        if said:
            yield Thinking(said)
    yield from _pass_breaks(source)


def _pass_breaks(source: Source) -> Waiting[None]:
    while (yield from source.match("\n")):
        pass
    source.settle()


class Phase(Enum):
    """How far an output has come."""

    MAY_BEGIN = auto()
    """Nothing is said yet, and the start of thinking may follow."""
    THINKING = auto()
    OVER = auto()
    """Its thinking has ended, or it has none: what follows is the answer."""


class Place(NamedTuple):
    """A place in an output, as far as its thinking is concerned."""

    phase: Phase
    tail: tuple[str, ...] = ()
    """The last tokens, spelled out: as many as may belong to a marker."""
    spent: int = 0
    """Tokens of thinking so far; those of the tail too, until they turn out to be its end."""


OVER = Place(Phase.OVER)


def overruns(end: str, spelled: Iterable[str]) -> dict[str, list[int]]:
    """Return the tokens that complete the end and go on beyond it, by what of the end stands before them.

    Line breaks behind the end belong to it.
    """
    found: dict[str, list[int]] = {end[:at]: [] for at in range(len(end))}
    rests = tuple(end[at:] for at in range(1, len(end)))
    for token, text in enumerate(spelled):
        if end in text and text.partition(end)[2].strip("\n"):
            found[""].append(token)
        if text.startswith(rests):
            for at in range(1, len(end)):
                if text.startswith(end[at:]) and text[len(end) - at :].strip("\n"):
                    found[end[:at]].append(token)
    return {begun: tokens for begun, tokens in found.items() if tokens}


class ThinkingTrack:
    """Finds where the thinking in an output's tokens, spelled out, begins and ends; several markers work."""

    def __init__(self, start: str, end: str, spell: Callable[[int], str], *, opened: bool) -> None:
        self._start, self._end, self._spell = start, end, spell
        self.first = Place(Phase.THINKING if opened else Phase.MAY_BEGIN)

    def after(self, place: Place, token: int) -> Place:
        """Return where a token leads."""
        if place.phase == Phase.OVER:
            return place
        pieces = (*place.tail, self._spell(token))
        text = "".join(pieces)
        if place.phase == Phase.MAY_BEGIN:
            said = text.lstrip()
            if self._start.startswith(said):
                is_whole = said == self._start
                return Place(Phase.THINKING) if is_whole else Place(Phase.MAY_BEGIN, pieces)
            if not said.startswith(self._start):
                return OVER
            text = said[len(self._start) :]
            pieces = (text,)
        spent = place.spent + 1
        if (begin := text.find(self._end)) >= 0:
            return OVER._replace(spent=spent - len(_last(pieces, len(text) - begin)))
        begun = max(at for at in range(len(self._end)) if text.endswith(self._end[:at]))
        return Place(Phase.THINKING, _last(pieces, begun), spent)


def _last(pieces: tuple[str, ...], length: int) -> tuple[str, ...]:
    """Return as many of the last pieces as hold this many characters."""
    at = len(pieces)
    while length > 0:
        at -= 1
        length -= len(pieces[at])
    return pieces[at:]
