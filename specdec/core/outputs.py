"""What a request gives back: pieces while it runs, a completion at the end."""

import io
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from queue import SimpleQueue
from typing import Literal, Self

from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.core.stats import Sums
from specdec.draft.outlook import Outlook
from specdec.errors import SpecdecError
from specdec.state_slots.arena import ArenaUsage
from specdec.text.tokenizer import Piece, Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]
"""`abort`: it was cancelled; `error`: it failed, and what it had said until then is kept."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token's log-probability under the model, and those of the likeliest tokens there."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    decoded_token: str | None = None
    """The token's text; None without a tokenizer."""
    decoded_top: tuple[str, ...] = ()
    """The texts of `top`."""

    def decoded(self, spell: Callable[[int], str]) -> "TokenLogprob":
        """Return the same with the tokens' texts."""
        top = tuple(self.top)
        texts = tuple(spell(token) for token, _ in top)
        return replace(self, top=top, decoded_token=spell(self.token_id), decoded_top=texts)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What one request's steps did.

    A verify step begins with the token chosen last and chooses what follows; the last step of a
    prefill is none, nor is one that recomputes what a preemption dropped.
    """

    prompt_tokens: int
    output_tokens: int
    steps: int = 0
    """Verify steps."""
    verified_tokens: int = 0
    """What they added to the output, the bonus tokens included."""
    drafted: int = 0
    accepted: int = 0
    accepted_from_outputs: int = 0
    """Those of them that were looked up in outputs of earlier requests, and found nowhere else."""
    per_depth: tuple[float, ...] = ()
    """The share accepted at each depth, of the drafts that reached it."""
    histogram: dict[int, int] = field(default_factory=dict)
    """Verify steps by the number of drafted tokens they accepted."""
    by_context: dict[int, Sums] = field(default_factory=dict)
    """The same sums by how long the text was from which a step went on: up to 1024 tokens, 2048, 4096 …"""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of its verify steps by phase: draft, verify, commit, rest; `whole` of those that the device
    ran from end to end. Requests share steps."""
    cached_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    """From arrival until it first ran; what it waits after a preemption is none of it."""
    first_token_s: float = 0.0
    """From arrival to its first token."""
    total_s: float = 0.0
    synthetic: bool = False
    """Drafts were accepted at given rates: the text is not the model's."""

    @property
    def acceptance_length(self) -> float:
        """Output tokens per verify step, the bonus token included; 1 without drafts."""
        return self.verified_tokens / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What prefixes that are kept have saved, and what became of them."""

    asked: int
    """Tokens of requests that were looked up."""
    hit: int
    """Those of them that need not be read."""
    fetched: int
    """Those of these that had to be copied from the host's memory."""
    states_kept: int
    states_evicted: int
    blocks_evicted: int
    cached_bytes: int
    """Of the arena, evicted when memory is short."""
    alpha: float = 0.0
    """What the work that a prefix saves counts beside how recently it was used."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine's steps have done since it started, and what it holds now.

    `steps` counts each request's verify steps; requests that shared a step count it each.
    """

    steps: int
    tokens: int
    drafted: int
    accepted: int
    acceptance_length: float
    per_depth: tuple[float, ...]
    histogram: dict[int, int]
    by_context: dict[int, Sums]
    """`steps`, `tokens`, `drafted`, `accepted` and `acceptance_length` by how long the text was from which a
    step went on: up to 1024 tokens, 2048, 4096 …"""
    seconds: dict[str, float]
    synthetic: bool
    running: int
    waiting: int
    preemptions: int
    limited_by: dict[str, int]
    """How many steps something was short, by what it was."""
    arena: ArenaUsage
    device_steps: int = 0
    """Steps that the device decided: replayed as graphs on a GPU, played from tapes on a CPU."""
    host_steps: dict[str, int] = field(default_factory=dict)
    """Steps that the host made, prompts' too, by why; empty where `graphs` are off."""
    failed_steps: int = 0
    """Steps that raised something: their requests ended with an error, and the engine went on."""
    clean_checks: int = 0
    """How often nothing was left to do and the arena was proved empty and whole."""
    moved_blocks: int = 0
    """Moved together so that others could have their slab."""
    prefixes: PrefixStats | None = None
    """None: nothing is kept."""
    speculation: Outlook | None = None
    """Which drafts run now and why (`name`, `reason`), the tokens a step that they are expected to give and
    what it costs; None: there are no drafters, or nothing was decided yet."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What one verify step put before the target, and what the text took of it.

    Node 0 is the token chosen last; where nothing was drafted it is the only one.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Of each node; -1 is that of node 0, and any other stands before its children."""
    accepted: tuple[int, ...]
    """The nodes below node 0 that the text took, from above."""
    bonus: int | None
    """The target's own token after them; None: the text had ended before it."""


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
    origins: tuple[int, ...] = ()
    """Where each token came from: 0 is the target's own choice, n at least 1 a draft's at depth n."""
    pieces: tuple[Piece, ...] = ()
    """The text by the tokens that wrote it, each piece with its token's origin."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each of the prompt's tokens, None for the first; in a choice's first delta, if asked for."""
    drafts: tuple[DraftTree, ...] = ()
    """One for each verify step, if `SamplingParams.trees` asks for them."""
    stop_reason: str | int | None = None
    """The stop string, or the token of `stop_token_ids`, that ended it; None where it ended otherwise."""

    @property
    def num_told(self) -> int:
        """Count the tokens that it tells of: its own, those beside them, and those of drafts."""
        ranked = [own for own in (*(self.logprobs or ()), *(self.prompt_logprobs or ())) if own]
        drafted = sum(len(draft.tokens) for draft in self.drafts)
        return len(self.token_ids) + drafted + sum(1 + len(own.top) for own in ranked)

    def decoded(self, tokenizer: Tokenizer | None) -> "Delta":
        """Return the same, with the texts of tokens whose log-probabilities were asked for."""
        if tokenizer is None or (self.logprobs is None and self.prompt_logprobs is None):
            return self
        spell = cache(tokenizer.spell)  # a prompt's alternatives are a few tokens many times over
        own, prompts = self.logprobs, self.prompt_logprobs
        return replace(
            self,
            logprobs=None if own is None else tuple(each.decoded(spell) for each in own),
            prompt_logprobs=None if prompts is None else tuple(x and x.decoded(spell) for x in prompts),
        )

    @classmethod
    def joined(cls, deltas: Iterable["Delta"]) -> "Delta":
        """Put deltas of one choice, in their order, into one."""
        gathered = Gathered()
        for delta in deltas:
            gathered.add(delta)
        return gathered.delta()


FEW = 16
"""Deltas, or tokens of one delta, below which they are not packed: a stream takes one or two at a time."""


class Gathered:
    """What one choice has said, in columns: an object for each token would take ten times the memory."""

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
        """Why it ended, if it has."""
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
        """Of each piece of the text: how long it is, and its token's origin."""
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
        """Return all of it as one delta that ends like the last."""
        text, ends = self._text.getvalue(), itertools.accumulate(self._lengths)
        pieces = zip(self._lengths, ends, self._sources, strict=True)
        return replace(
            last,
            text=text,
            token_ids=tuple(self._ids),
            origins=tuple(self._origins),
            logprobs=None if last.logprobs is None else tuple(self._logprobs),
            pieces=tuple(Piece(text[end - length : end], origin) for length, end, origin in pieces),
            prompt_logprobs=self._prompt,
            drafts=tuple(self._drafts),
        )


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
    origins: tuple[int, ...] = field(default=(), repr=False)
    """Where each token came from: 0 is the target's own choice, n at least 1 a draft's at depth n."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = field(default=None, repr=False)
    """One for each of the prompt's tokens, None for the first, where they were asked for."""
    drafts: tuple[DraftTree, ...] = field(default=(), repr=False)
    """One for each verify step, if `SamplingParams.trees` asks for them."""
    stop_reason: str | int | None = None
    """The stop string, or the token of `stop_token_ids`, that ended it; None where it ended otherwise."""
    error: SpecdecError | None = None
    """Why it failed, where it did."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of its tokens' log-probabilities, where they were asked for."""
        return None if self.logprobs is None else sum(own.logprob for own in self.logprobs)

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        index: int,
        deltas: Sequence[Delta],
        error: SpecdecError | None = None,
    ) -> Self:
        """Put a choice together from its deltas; one that was left before its end has counts alone."""
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
    asked: Sequence[tuple[Sequence[int], int]],
    inbox: "SimpleQueue[tuple[int, Delta | SpecdecError]]",
    tokenizer: Tokenizer | None,
    *,
    use_tqdm: bool,
) -> list[Completion]:
    """Read what the choices of some prompts say until all have ended; then raise an error.

    The error is the first prompt's that failed, and has all completions.
    """
    said: list[list[list[Delta]]] = [[[] for _ in range(choices)] for _, choices in asked]
    errors: list[SpecdecError | None] = [None for _ in asked]
    unfinished = sum(choices for _, choices in asked)
    with tqdm(total=unfinished, desc="completions", unit="choice", disable=not use_tqdm) as bar:
        while unfinished:
            index, item = inbox.get()
            if isinstance(item, SpecdecError):
                errors[index] = item
            else:
                said[index][item.index].append(item.decoded(tokenizer))
                if item.finish_reason is None:
                    continue
            unfinished -= 1
            bar.update()
    done = [
        Completion.of(prompt, choice, deltas, error)
        for (prompt, _), choices, error in zip(asked, said, errors, strict=True)
        for choice, deltas in enumerate(choices)
    ]
    if failed := next(filter(None, errors), None):
        raise failed.having(done)
    return done
