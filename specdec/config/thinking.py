"""Where within an output a model thinks before it answers, and how much it may."""

from typing import Annotated

from pydantic import Field

from specdec.config.base import Settings

LONGEST_MARKER = 64
Marker = Annotated[str, Field(min_length=1, max_length=LONGEST_MARKER)]


class ThinkingSpan(Settings):
    """The markers around an output's thinking. `structured_outputs` bounds only what follows it."""

    start: Marker = Field(
        "<think>", title="what thinking begins with", description="a text of 1 to 64 characters"
    )
    end: Marker = Field(
        "</think>", title="what thinking ends with", description="a text of 1 to 64 characters"
    )
    opened: bool = Field(
        True,
        title="the prompt ends with the start, so that the output begins within thinking; False: it thinks "
        "if it begins with the start",
        description="True or False",
    )
    budget: int | None = Field(
        None,
        ge=0,
        title="tokens of thinking after which it is ended; None: no limit",
        description="an integer of at least 0, or None",
    )
