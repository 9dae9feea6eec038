"""Thinking settings of a chat, and counting of thinking tokens."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec.config.template import FIELD
from specdec.config.thinking import ThinkingSpan
from specdec.server.bodies import ChatBody
from specdec.text.answers.thinking import ThinkingFormat, ThinkingState, ThinkingTrack
from specdec.text.chat_template import THINKING_SWITCHES, ChatTemplate
from specdec.text.tokenizer import Tokenizer

EFFORT = "reasoning_effort"
LITTLE = {"none", "minimal"}
"""Efforts that switch thinking off in templates that only have a switch."""


def template_variables(
    body: ChatBody, template: ChatTemplate, defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the template variables of a chat, and the fields without a variable."""
    switches, effort = [name for name in THINKING_SWITCHES if template.takes(name)], body.reasoning_effort
    variables, ignored = dict[str, Any](), list[str]()
    if effort is not None:
        variables = {EFFORT: effort} if template.takes(EFFORT) else {}
        variables |= dict.fromkeys(switches, effort not in LITTLE)
        ignored += [] if variables else [EFFORT]
    if body.enable_thinking is not None:
        variables |= dict.fromkeys(switches, body.enable_thinking)
        ignored += [] if switches else [THINKING_SWITCHES[0]]
    request_variables = body.chat_template_kwargs or {}
    return {**defaults, **variables, **request_variables}, [*ignored, *unread(request_variables, template)]


def unread(variables: Iterable[str], template: ChatTemplate) -> list[str]:
    """Return given variables that the template does not use, as field names."""
    return [f"{FIELD}.{name}" for name in variables if not template.takes(name)]


def span_of(form: ThinkingFormat, budget: int | None) -> ThinkingSpan:
    """Return the engine's settings for an answer's thinking."""
    return ThinkingSpan(start=form.start, end=form.end, opened=form.opened, budget=budget)


class ThinkingTokens:
    """Counts thinking tokens of a request's choices."""

    def __init__(self, form: ThinkingFormat, tokenizer: Tokenizer) -> None:
        self._track = ThinkingTrack(form.start, form.end, tokenizer.spell, opened=form.opened)
        self._places: dict[int, ThinkingState] = {}

    def add(self, choice: int, ids: Sequence[int]) -> None:
        """Process a choice's next tokens."""
        state = self._places.get(choice, self._track.first)
        for token in ids:
            state = self._track.after(state, token)
        self._places[choice] = state

    @property
    def total(self) -> int:
        return sum(state.spent for state in self._places.values())
