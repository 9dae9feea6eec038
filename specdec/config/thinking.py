"""Thinking markers and budget of an output."""

from typing import Annotated

from pydantic import Field

from specdec.config.base import Settings
from specdec.config.fields import integer, switch

LONGEST_MARKER = 64
Marker = Annotated[str, Field(min_length=1, max_length=LONGEST_MARKER)]


class ThinkingSpan(Settings):
    """Markers around an output's thinking. `structured_outputs` only constrains the text after it."""

    start: Marker = Field("<think>", title="start marker", description="a string of 1 to 64 characters")
    end: Marker = Field("</think>", title="end marker", description="a string of 1 to 64 characters")
    opened: bool = switch(
        True, "the prompt ends with the start marker; False: the output thinks if it begins with it"
    )
    budget: int | None = integer(None, "maximum tokens of thinking; None: no limit", least=0)
