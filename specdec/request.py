"""The life of one request: what it owes the model, what memory it holds, what it has said.

A request always owes the tokens that it has and the model has not yet read: a prompt, what a preemption took
back, or the one token that was chosen last. A step reads some of them; when none is left, the model's last
logits choose the next token. Prefill, resumption and decoding are therefore one thing.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from specdec.config import SamplingParams
from specdec.errors import SpecdecError
from specdec.outputs import Delta, FinishReason, RequestStats, TokenLogprob
from specdec.text import TextStream
from specdec.verify.choose import Chooser

logger = logging.getLogger(__name__)

Emit = Callable[[Delta | SpecdecError], None]


class Request:
    """One choice of one prompt. Only the thread that owns the model changes it once it was submitted."""

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        chooser: Chooser,
        text: TextStream | None,
        stop_ids: frozenset[int],
        max_length: int,
        emit: Emit,
        index: int = 0,
    ) -> None:
        self.number = number
        self.params, self.chooser, self.text, self.emit, self.index = params, chooser, text, emit, index
        self.stop_ids = stop_ids
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.last_length = min(len(prompt) + params.max_tokens, max_length)
        self.arrived_s = time.perf_counter()
        self.first_token_s = 0.0
        self.steps = self.preemptions = 0
        self.cancelled = False
        """Set by any thread; acted upon between two steps."""
        self.finish_reason: FinishReason | None = None
        self.forget_memory()

    def forget_memory(self) -> None:
        """Note that the arena took everything back: the whole of `tokens` is owed again."""
        self.computed = 0
        self.table_N = torch.empty(0, dtype=torch.int64)
        """The KV blocks of its tokens, in order."""
        self.state: int | None = None

    def add_blocks(self, blocks: Sequence[int]) -> None:
        """Put blocks behind those that it has."""
        self.table_N = torch.cat([self.table_N, torch.tensor(blocks, dtype=torch.int64)])

    @property
    def owed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def accept(self, chosen: Sequence[tuple[int, TokenLogprob | None]]) -> Delta:
        """Append the tokens of one step up to the first that ends the request; return what is to be sent."""
        if not self.first_token_s:
            self.first_token_s = time.perf_counter() - self.arrived_s
        self.steps += 1
        text, kept = "", []
        for token, logprob in chosen:
            self.tokens.append(token)
            kept.append((token, logprob))
            self.chooser.observe(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif self.text is not None:
                text += self.text.push(token)
                if self.text.stopped:
                    self.finish_reason = "stop"
            if self.finish_reason is None and len(self.tokens) >= self.last_length:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        return self._delta(text, kept)

    def abort(self) -> None:
        """End the request where it stands."""
        self.finish_reason = "abort"
        self.send(self._delta("", []))

    def fail(self, error: SpecdecError) -> None:
        """End the request with an error that was not its own."""
        self.finish_reason = "abort"
        self.send(error)

    def _delta(self, text: str, kept: Sequence[tuple[int, TokenLogprob | None]]) -> Delta:
        stats = None
        if self.finish_reason:
            text += self.text.finish() if self.text else ""
            stats = self._stats()
        logprobs = tuple(logprob for _, logprob in kept if logprob)
        return Delta(
            text=text,
            token_ids=tuple(token for token, _ in kept),
            index=self.index,
            logprobs=logprobs if self.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stats=stats,
        )

    def send(self, item: Delta | SpecdecError) -> None:
        """Hand an item to the caller; a caller that cannot take it is gone, and nobody else's trouble."""
        try:
            self.emit(item)
        except Exception as error:
            logger.info("request %d: its caller is gone (%r)", self.number, error)
            self.cancelled = True

    def _stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=self.prompt_length,
            output_tokens=self.output_length,
            steps=self.steps,
            preemptions=self.preemptions,
            first_token_s=self.first_token_s,
            total_s=time.perf_counter() - self.arrived_s,
        )
