"""One request: its uncomputed tokens, its memory, its output.

Uncomputed tokens are those without KV cache: a prompt, tokens lost to a preemption, or the last sampled
token. A step computes some of them; when none is left, the last logits give the next token. So prefill,
resumption and decode are the same operation.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from specdec.config.sampling import SamplingParams
from specdec.config.tenant import SOLE, Tenant
from specdec.core.outputs import Delta, DraftTree, FinishReason, RequestStats, TokenLogprob
from specdec.core.stats import SpeculationCounts
from specdec.errors import SpecdecError
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.prefix.lease import PrefixLease
from specdec.state_slots.slots import RequestId
from specdec.text.tokenizer import TextStream, TokenTextCutter
from specdec.verify.sampler import TokenSampler

logger = logging.getLogger(__name__)

Emit = Callable[[Delta | SpecdecError], None]


class OutputToken(NamedTuple):
    """One output token of a step."""

    token: int
    origin: int = 0
    """0: sampled by the target; n: accepted from a draft at depth n."""
    logprob: TokenLogprob | None = None


class Request:
    """One choice of one prompt. After submission only the engine thread changes it."""

    def __init__(
        self,
        number: RequestId,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        chooser: TokenSampler,
        text: TextStream | None,
        stop_ids: Mapping[int, int | None],
        max_length: int,
        emit: Emit,
        index: int = 0,
        synthetic: bool = False,
        tenant: Tenant = SOLE,
    ) -> None:
        self.number, self.tenant = number, tenant
        self.params, self.chooser, self.text, self.emit, self.index = params, chooser, text, emit, index
        self.stop_ids = stop_ids
        """End tokens, with the `stop_reason` of each."""
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.turns: Sequence[int] = ()
        """Prompt lengths after its first and last turn."""
        self.last_length = min(len(prompt) + params.max_tokens, max_length)
        self.arrived_s = time.perf_counter()
        self.since_s = 0.0
        """Time of its last submission, admission or preemption, by the scheduler's clock."""
        self.turn_until_s = 0.0
        """Time until which it is not preempted for a caller without running requests."""
        self.queued_s = self.first_token_s = 0.0
        self.preemptions = 0
        self.charged_tokens = 0
        """Computed or cached tokens that its caller's virtual time includes."""
        self.last_step = 0
        """Last scheduler step that included this request."""
        self.counts = SpeculationCounts()
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the computed prompt tokens from the second on, if requested."""
        self.synthetic = synthetic
        """Whether drafts are accepted at fixed rates; reported in its statistics."""
        self.cancelled = False
        """Checked between steps."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        """The stop string or `stop_token_ids` token that ended it."""
        self._unsent_text = ""
        self._unsent: list[OutputToken] = []
        self._has_sent = False
        self._drafts: list[DraftTree] = []
        self._cutter = TokenTextCutter()
        self.cached_tokens = 0
        """Number of prompt tokens found in the prefix cache."""
        self.is_prefill_only = False
        """Whether it prefills all but the last token of its prompt for another engine, and samples none."""
        self.is_finite = True
        """Whether the last hidden state of such a prefill is free of NaN and Inf."""
        self.forget_memory()

    def forget_memory(self) -> None:
        """Reset its memory after the arena has released it; all tokens become uncomputed."""
        self.num_computed_tokens = 0
        self.table_N = torch.empty(0, dtype=torch.int64)
        """KV blocks of its tokens, in order."""
        self.committed: CommittedState | None = None
        """Its committed state; None without memory, or for a model without states."""
        self.lease: PrefixLease | None = None
        """Its position in the prefix cache, if enabled."""

    def begin_at(self, length: int, blocks: Sequence[int], lease: PrefixLease | None) -> None:
        """Start from a cached prefix."""
        self.num_computed_tokens, self.lease = length, lease
        self.cached_tokens = max(self.cached_tokens, min(length, self.prompt_length))
        self.charged_tokens = max(self.charged_tokens, length)
        self.add_blocks(blocks)

    def start(self) -> None:
        """Record the queueing time; no effect after a preemption."""
        self.queued_s = self.queued_s or time.perf_counter() - self.arrived_s

    def add_blocks(self, blocks: Sequence[int]) -> None:
        """Append blocks."""
        self.table_N = torch.cat([self.table_N, torch.tensor(blocks, dtype=torch.int64)])

    def move_blocks(self, moved: Mapping[int, int]) -> None:
        """Update the block table after blocks have moved."""
        self.table_N = torch.tensor([moved.get(block, block) for block in self.table_N.tolist()])

    @property
    def num_schedulable_tokens(self) -> int:
        """Number of uncomputed tokens that one step may compute."""
        stop = self.lease.tokens_to_next_state(self.num_computed_tokens) if self.lease else None
        count = self.num_uncomputed_tokens - self.is_prefill_only
        return count if stop is None else min(count, stop)

    @property
    def has_prefilled(self) -> bool:
        """Whether a prefill-only request has finished its prefill."""
        return self.is_prefill_only and self.num_uncomputed_tokens == 1

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token is uncomputed, which is the root of a possible draft."""
        return self.num_uncomputed_tokens == 1 and self.output_length > 0

    @property
    def num_remaining_tokens(self) -> int:
        """Number of tokens its output may still get."""
        return self.last_length - len(self.tokens)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def accept(self, chosen: Sequence[OutputToken]) -> int:
        """Append a step's tokens up to the first that ends the request; return their number.

        `take_delta` returns the part to be sent.
        """
        if not self.first_token_s:
            self.first_token_s = time.perf_counter() - self.arrived_s
        if not self.num_remaining_tokens:
            # Only a prefill was requested; sampled tokens are dropped.
            self.finish_reason = "length"
            return 0
        for token in chosen:
            self.tokens.append(token.token)
            self._unsent.append(token)
            self.chooser.observe(token.token)
            if self.chooser.fault:
                break
            if token.token in self.stop_ids:
                self.finish_reason, self.stop_reason = "stop", self.stop_ids[token.token]
                if self.params.include_stop_str_in_output:
                    self._write(token, may_stop=False)
            else:
                self._write(token, may_stop=self.output_length > self.params.min_tokens)
            if self.finish_reason is None and self.chooser.is_over:
                self.finish_reason = "stop"
            # A grammar mask may still be missing; then `check_finished` decides later.
            if self.finish_reason is None and self.num_remaining_tokens <= 0 and self.chooser.knows():
                self.finish_reason = "length"
            if self.finish_reason or self.num_remaining_tokens <= 0:
                break
        return len(self._unsent)

    def end_prefill(self) -> None:
        """Finish a prefill-only request."""
        self.first_token_s = time.perf_counter() - self.arrived_s
        self.finish_reason = "length"

    def _write(self, token: OutputToken, *, may_stop: bool) -> None:
        """Append a token's text to the unsent text; a stop string in it ends the request."""
        if self.text is None:
            return
        self._unsent_text += self.text.push(token.token, may_stop=may_stop)
        self._cutter.note(self.text.length, token.origin)
        if self.text.stopped:
            self.finish_reason, self.stop_reason = "stop", self.text.stop

    def check_finished(self) -> bool:
        """Finish the request if its grammar or length limit has ended it; return whether it has ended."""
        if self.chooser.is_over:
            self.finish_reason = "stop"
        elif self.num_remaining_tokens <= 0 and self.output_length and self.chooser.knows():
            self.finish_reason = "length"
        return self.finish_reason is not None

    def show(self, draft: DraftTree) -> None:
        """Add a step's draft tree to the next delta."""
        self._drafts.append(draft)

    def abort(self) -> None:
        """End the request with its current output."""
        self.finish_reason = "abort"
        self.send(self.take_delta())

    def fail(self, error: SpecdecError) -> None:
        """End the request with an error."""
        self.finish_reason = "abort"
        self.send(error)

    def take_delta(self) -> Delta:
        """Return the output since the last delta; the last one includes statistics."""
        text, kept, self._unsent_text, self._unsent = self._unsent_text, self._unsent, "", []
        drafts, self._drafts = self._drafts, []
        stats = None
        if self.finish_reason:
            text += self.text.finish() if self.text else ""
            stats = self._stats()
        logprobs = tuple(token.logprob for token in kept if token.logprob)
        return Delta(
            text=text,
            token_ids=tuple(token.token for token in kept),
            index=self.index,
            logprobs=logprobs if self.params.logprobs is not None else None,
            prompt_logprobs=self._take_prompt_logprobs(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            stats=stats,
            origins=tuple(token.origin for token in kept),
            pieces=self._cutter.cut(text),
            drafts=tuple(drafts),
        )

    def send(self, item: Delta | SpecdecError) -> None:
        """Pass an item to the caller; if that raises, cancel the request."""
        try:
            self.emit(item)
        except Exception as error:
            logger.info("request %d: its caller is gone (%r)", self.number, error)
            self.cancelled = True

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Return the prompt's log-probabilities with the first delta, None for the first token."""
        if self.params.prompt_logprobs is None or self._has_sent:
            return None
        self._has_sent = True
        return (None, *self.prompt_logprobs)

    def _stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=self.prompt_length,
            output_tokens=self.output_length,
            steps=self.counts.steps,
            verified_tokens=self.counts.tokens,
            drafted=self.counts.drafted,
            accepted=self.counts.accepted,
            accepted_from_outputs=self.counts.accepted_from_outputs,
            per_depth=self.counts.per_depth,
            histogram=dict(sorted(self.counts.histogram.items())),
            by_context=self.counts.by_context(),
            seconds=dict(self.counts.seconds),
            preemptions=self.preemptions,
            synthetic=self.synthetic,
            cached_tokens=self.cached_tokens,
            queued_s=self.queued_s,
            first_token_s=self.first_token_s,
            total_s=time.perf_counter() - self.arrived_s,
        )
