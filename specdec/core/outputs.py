"""Request outputs: deltas while it runs, a completion at the end."""

import io
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from queue import SimpleQueue
from typing import Literal, Self

from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.core.stats import StepSums
from specdec.draft.decision import DraftDecision
from specdec.errors import SpecdecError
from specdec.state_slots.arena import ArenaUsage
from specdec.text.tokenizer import TextPiece, Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]
"""`abort`: cancelled; `error`: failed, with the output so far."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of the chosen and the likeliest tokens."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    decoded_token: str | None = None
    """The token's text; None without a tokenizer."""
    decoded_top: tuple[str, ...] = ()
    """The texts of `top`."""

    def decoded(self, spell: Callable[[int], str]) -> "TokenLogprob":
        """Return it with the tokens' texts."""
        top = tuple(self.top)
        texts = tuple(spell(token) for token, _ in top)
        return replace(self, top=top, decoded_token=spell(self.token_id), decoded_top=texts)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Statistics of one request.

    A verify step starts with the last sampled token. The last step of a prefill does not count as one, nor
    does a step that recomputes preempted tokens.
    """

    prompt_tokens: int
    output_tokens: int
    steps: int = 0
    """Verify steps."""
    verified_tokens: int = 0
    """Tokens they added to the output, bonus tokens included."""
    drafted: int = 0
    accepted: int = 0
    accepted_from_outputs: int = 0
    """Accepted tokens that only look-ups in earlier requests' outputs had proposed."""
    per_depth: tuple[float, ...] = ()
    """Fraction accepted at each depth, of the drafts that reached it."""
    histogram: dict[int, int] = field(default_factory=dict)
    """Verify steps by their number of accepted draft tokens."""
    by_context: dict[int, StepSums] = field(default_factory=dict)
    """The same sums by context length of the step: up to 1024 tokens, 2048, 4096 …"""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of its verify steps by phase: draft, verify, commit, rest; `whole` for steps that ran
    entirely on the device. Requests share steps."""
    cached_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    """Time from arrival to its first step; waiting after a preemption is excluded."""
    first_token_s: float = 0.0
    """Time from arrival to its first token."""
    total_s: float = 0.0
    synthetic: bool = False
    """Whether drafts were accepted at fixed rates, in which case the text is not the model's."""

    @property
    def acceptance_length(self) -> float:
        """Output tokens per verify step, the bonus token included; 1 without drafts."""
        return self.verified_tokens / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Prefix cache statistics."""

    asked: int
    """Tokens of requests that queried the cache."""
    hit: int
    """Tokens found, which need no prefill."""
    fetched: int
    """Tokens among these that were copied from host memory."""
    states_cached: int
    states_evicted: int
    blocks_evicted: int
    cached_bytes: int
    """Bytes of the arena, evicted when memory is short."""
    alpha: float = 0.0
    """Eviction weight of the work a prefix saves, relative to recency."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Engine statistics since the start, and current usage.

    `steps` counts verify steps per request; a shared step counts once for each of its requests.
    """

    steps: int
    tokens: int
    drafted: int
    accepted: int
    acceptance_length: float
    per_depth: tuple[float, ...]
    histogram: dict[int, int]
    by_context: dict[int, StepSums]
    """`steps`, `tokens`, `drafted`, `accepted` and `acceptance_length` by context length of the step: up to
    1024 tokens, 2048, 4096 …"""
    seconds: dict[str, float]
    synthetic: bool
    running: int
    waiting: int
    preemptions: int
    limited_by: dict[str, int]
    """Number of steps in which a resource was short, by resource."""
    arena: ArenaUsage
    device_steps: int = 0
    """Steps run on the device: CUDA graphs on a GPU, tapes on a CPU."""
    host_steps: dict[str, int] = field(default_factory=dict)
    """Steps run on the host, prefill included, by reason; empty if `graphs` is off."""
    failed_steps: int = 0
    """Steps that raised: their requests ended with an error, and the engine recovered."""
    clean_checks: int = 0
    """Number of idle checks of the arena that passed."""
    moved_blocks: int = 0
    """Blocks compacted to free whole slabs."""
    prefixes: PrefixStats | None = None
    """None: no prefix cache."""
    speculation: DraftDecision | None = None
    """Current drafting decision (`name`, `reason`) with its expected tokens and cost; None without drafters
    or before the first decision."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tree of one verify step, and its outcome.

    Node 0 is the last sampled token; without a draft it is the only node.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Parent of each node, -1 for node 0; parents precede their children."""
    accepted: tuple[int, ...]
    """Accepted nodes below node 0, in order."""
    bonus: int | None
    """Bonus token after them; None if the text ended before it."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Output that one step added to a request.

    `text` may lag behind `token_ids`: incomplete characters and possible stop strings are held back. The last
    delta of a choice has its finish reason and statistics.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    origins: tuple[int, ...] = ()
    """Origin of each token: 0 for the target, n ≥ 1 for a draft accepted at depth n."""
    pieces: tuple[TextPiece, ...] = ()
    """The text split by token, with each token's origin."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per prompt token, None for the first; in a choice's first delta, if requested."""
    drafts: tuple[DraftTree, ...] = ()
    """One per verify step, if `SamplingParams.trees` is set."""
    stop_reason: str | int | None = None
    """The stop string or `stop_token_ids` token that ended it; None otherwise."""

    @property
    def num_reported(self) -> int:
        """Return the number of tokens it reports: its own, their alternatives, and those of drafts."""
        ranked = [logprob for logprob in (*(self.logprobs or ()), *(self.prompt_logprobs or ())) if logprob]
        drafted = sum(len(draft.tokens) for draft in self.drafts)
        return len(self.token_ids) + drafted + sum(1 + len(logprob.top) for logprob in ranked)

    def decoded(self, tokenizer: Tokenizer | None) -> "Delta":
        """Return it with the texts of tokens that have log-probabilities."""
        if tokenizer is None or (self.logprobs is None and self.prompt_logprobs is None):
            return self
        spell = cache(tokenizer.spell)  # a prompt's alternatives repeat a few tokens
        logprobs, prompt_logprobs = self.logprobs, self.prompt_logprobs
        return replace(
            self,
            logprobs=None if logprobs is None else tuple(x.decoded(spell) for x in logprobs),
            prompt_logprobs=None
            if prompt_logprobs is None
            else tuple(x and x.decoded(spell) for x in prompt_logprobs),
        )

    @classmethod
    def joined(cls, deltas: Iterable["Delta"]) -> "Delta":
        """Concatenate deltas of one choice."""
        gathered = CollectedOutput()
        for delta in deltas:
            gathered.add(delta)
        return gathered.delta()


FEW = 16
"""Number of deltas, or tokens of one, from which they are packed; a stream holds one or two at a time."""


class CollectedOutput:
    """Output of one choice in columns: an object per token would take ten times the memory."""

    def __init__(self) -> None:
        self._recent: list[Delta] = []
        self._columns: _Columns | None = None
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        """Append the choice's next delta."""
        self._last = delta
        self._recent.append(delta)
        if len(self._recent) >= FEW or len(delta.token_ids) >= FEW:
            self._fold()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Its finish reason; None while it runs."""
        return self._last.finish_reason if self._last else None

    def delta(self) -> Delta:
        """Return all of it as one delta."""
        last = self._last
        assert last
        if len(self._recent) == 1 and self._columns is None:
            return last
        return self._fold().delta(last)

    def _fold(self) -> "_Columns":
        if self._columns is None:
            self._columns = _Columns(self._recent[0].prompt_logprobs)
        for delta in self._recent:
            self._columns.add(delta)
        self._recent.clear()
        return self._columns


class _Columns:
    """Concatenated deltas, one array for each field."""

    def __init__(self, prompt_logprobs: tuple[TokenLogprob | None, ...] | None) -> None:
        self._prompt = prompt_logprobs
        self._text = io.StringIO(newline="")
        self._ids, self._origins = array("i"), array("i")
        self._lengths, self._sources = array("i"), array("i")
        """Length of each text piece, and its token's origin."""
        self._logprobs: list[TokenLogprob] = []
        self._drafts: list[DraftTree] = []

    def add(self, delta: Delta) -> None:
        self._text.write(delta.text)
        self._ids.extend(delta.token_ids)
        self._origins.extend(delta.origins)
        self._lengths.extend([len(piece.text) for piece in delta.pieces])
        self._sources.extend([piece.origin for piece in delta.pieces])
        self._logprobs.extend(delta.logprobs or ())
        self._drafts.extend(delta.drafts)

    def delta(self, last: Delta) -> Delta:
        """Return one delta with the other fields of the last one."""
        text, ends = self._text.getvalue(), itertools.accumulate(self._lengths)
        pieces = zip(self._lengths, ends, self._sources, strict=True)
        return replace(
            last,
            text=text,
            token_ids=tuple(self._ids),
            origins=tuple(self._origins),
            logprobs=None if last.logprobs is None else tuple(self._logprobs),
            pieces=tuple(TextPiece(text[end - length : end], origin) for length, end, origin in pieces),
            prompt_logprobs=self._prompt,
            drafts=tuple(self._drafts),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice. `index` numbers a prompt's choices if `n` is above 1."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    origins: tuple[int, ...] = field(default=(), repr=False)
    """Origin of each token: 0 for the target, n ≥ 1 for a draft accepted at depth n."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = field(default=None, repr=False)
    """One per prompt token, None for the first, if requested."""
    drafts: tuple[DraftTree, ...] = field(default=(), repr=False)
    """One per verify step, if `SamplingParams.trees` is set."""
    stop_reason: str | int | None = None
    """The stop string or `stop_token_ids` token that ended it; None otherwise."""
    error: SpecdecError | None = None
    """The error, if it failed."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of its tokens' log-probabilities, if requested."""
        return None if self.logprobs is None else sum(item.logprob for item in self.logprobs)

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        index: int,
        deltas: Sequence[Delta],
        error: SpecdecError | None = None,
    ) -> Self:
        """Build a choice from its deltas; an unfinished one has token counts only."""
        whole = Delta.joined(deltas or [Delta("", ())])
        counts = RequestStats(prompt_tokens=len(prompt), output_tokens=len(whole.token_ids))
        return cls(
            prompt_token_ids=tuple(prompt),
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=whole.finish_reason or ("error" if error else "abort"),
            stats=whole.stats or counts,
            index=index,
            logprobs=whole.logprobs,
            origins=whole.origins,
            prompt_logprobs=whole.prompt_logprobs,
            drafts=whole.drafts,
            stop_reason=whole.stop_reason,
            error=None if whole.finish_reason else error,
        )


def collect(
    requested: Sequence[tuple[Sequence[int], int]],
    inbox: "SimpleQueue[tuple[int, Delta | SpecdecError]]",
    tokenizer: Tokenizer | None,
    *,
    use_tqdm: bool,
) -> list[Completion]:
    """Collect the deltas of some prompts' choices until all have ended; raise if a prompt failed.

    The error is that of the first failed prompt, and carries all completions.
    """
    deltas_of: list[list[list[Delta]]] = [[[] for _ in range(choices)] for _, choices in requested]
    errors: list[SpecdecError | None] = [None for _ in requested]
    unfinished = sum(choices for _, choices in requested)
    with tqdm(total=unfinished, desc="completions", unit="choice", disable=not use_tqdm) as bar:
        while unfinished:
            index, item = inbox.get()
            if isinstance(item, SpecdecError):
                errors[index] = item
            else:
                deltas_of[index][item.index].append(item.decoded(tokenizer))
                if item.finish_reason is None:
                    continue
            unfinished -= 1
            bar.update()
    done = [
        Completion.of(prompt, choice, deltas, error)
        for (prompt, _), choices, error in zip(requested, deltas_of, errors, strict=True)
        for choice, deltas in enumerate(choices)
    ]
    if failed := next(filter(None, errors), None):
        raise failed.having(done)
    return done
