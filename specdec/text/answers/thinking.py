"""Thinking before an answer: the markers around it, and whether a prompt has opened it already."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

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
