"""What a request gives back: pieces while it runs, a completion at the end."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token's log-probability under the model, and those of the likeliest tokens there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What one request's verify steps did. The acceptance length counts the bonus token."""

    prompt_tokens: int
    output_tokens: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_depth: tuple[float, ...] = ()
    """Share accepted at each depth, among the steps that reached it."""
    cached_tokens: int = 0
    preemptions: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def acceptance_length(self) -> float:
        return self.output_tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to a request.

    `text` may lag behind `token_ids`: half a character, or what may become a stop string, is held back. The
    last delta of a choice carries its reason and its statistics.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice. `index` counts the choices of a prompt when `n` asks for several."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
