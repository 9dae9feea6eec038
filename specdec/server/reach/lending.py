"""Requests prefilled for another server; counterpart of `Answers`, without output."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Self

from specdec.config.sampling import SamplingParams
from specdec.core.outputs import Delta
from specdec.core.params import PreparedPrompt
from specdec.reach.protocol import BEAT_S
from specdec.server.answers import NewOutput, RequestDeadline
from specdec.server.bodies import RequestBody
from specdec.server.chunks import Chunks
from specdec.server.failures import Failure
from specdec.server.reach.bodies import LendFields
from specdec.server.reach.lender import Lender, PromptLoan


def lending_params(body: RequestBody) -> SamplingParams:
    """Return the parameters that affect prefill; sampling is the decode instance's."""
    return SamplingParams(max_tokens=1, cache_salt=body.cache_salt)


class Lending:
    """The prompts of one request, each prefilled once and held. Leaving early releases them."""

    def __init__(
        self,
        lender: Lender,
        prepared: Sequence[PreparedPrompt],
        fields: LendFields,
        deadline: RequestDeadline,
        writer: Chunks,
    ) -> None:
        self._lender, self._prepared, self._fields = lender, prepared, fields
        self._until, self._writer = deadline, writer
        self._loans: list[PromptLoan] = []
        self.is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_over:
            for loaned in self._loans:
                loaned.give_up()

    def fail(self, failure: Failure) -> None:
        """End it with an error, unless it is finished."""
        if not self.is_over:
            self._until.end(failure)

    async def __aiter__(self) -> AsyncIterator[NewOutput]:
        """Yield each prompt once prefilled; at the end, add how to fetch them to the response."""
        async with self._until.held():
            self._loans = await self._lend()
        keeping = asyncio.create_task(self._keep(), name="leases to be handed on")
        try:
            for choice, loaned in enumerate(self._loans):
                async with self._until.held():
                    stats = await loaned.read()
                delta = Delta("", (), finish_reason="length", stats=stats)
                yield NewOutput(choice, delta, ((time.perf_counter(), 0),))
        finally:
            keeping.cancel()
        self.is_over = True
        if self._fields.rooms is None:
            self._writer.add_fields({"kv_transfer_params": self._lender.transfer_params(self._loans)})

    async def _keep(self) -> None:
        """Keep the first leases of a long list alive while the last ones are prefilled."""
        while self._fields.rooms is None:
            await asyncio.sleep(BEAT_S)
            self._lender.book.restart_timeouts(loan.lease for loan in self._loans if loan.lease)

    async def _lend(self) -> list[PromptLoan]:
        if self._fields.cached_only:
            return await self._lender.lend_cached(self._prepared)
        return await self._lender.lend(self._prepared, self._fields.rooms)
