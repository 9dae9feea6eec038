"""A lease on a lent prefix: its progress, its reader, and its end."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.engine.transfers import PrefixLoan
from specdec.reach.messages import HiddenState, OpenRequest, OpenResponse
from specdec.reach.protocol import PrefixIdentity, ReachError, Reason

POLL_S = 0.003
"""Poll interval for work submitted to the device."""


@dataclass(slots=True, eq=False)
class TransferLease:
    """A lease. Owned by the event loop's thread; only `LeaseTable` starts and ends it."""

    id: str
    prompt: PrefixIdentity
    loan: PrefixLoan
    num_bytes: int
    block_tokens: int
    room: int | None
    caller: str = ""
    """Caller that requested it."""
    is_read: bool = False
    """Whether the engine has submitted all of its prefill; the device may lag."""
    read_s: float = 0.0
    """Time of that."""
    seen_s: float = 0.0
    """Time of the reader's last message, or of the hand-over."""
    reader: str | None = None
    end_reason: Reason | None = None
    error: BaseException | None = None
    """The engine's error, if the prefill failed."""
    is_located: bool = False
    """Whether the reader has the location of all its memory."""
    _sent: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Blocks and generations known to the reader."""
    _waiters: set["asyncio.Future[None]"] = field(default_factory=set)

    def check(self, request: OpenRequest) -> None:
        """Raise for another prompt, or another reader than the first."""
        if (request.hash, request.length) != (self.prompt.hash, self.prompt.length):
            raise ReachError(
                "other_prompt",
                "hash: another prompt is held here; send the same request to both servers, and give them the "
                "same model and template.",
                field="hash",
            )
        if self.reader not in (None, request.reader):
            raise ReachError(
                "held", "reader: another reader has this lease; prefill the prompt instead.", field="reader"
            )
        if request.num_cached > request.length:
            raise ReachError("malformed", "num_cached: give at most length.", field="num_cached")

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_more(self, tokens: int, limit_s: float) -> None:
        """Wait until more than `tokens` or all are ready, the lease ends, or time is up."""
        await self._wait(lambda: self.is_whole or self.ready > tokens, limit_s, with_device=True)

    async def wait_until_read(self) -> None:
        """Wait until the engine has submitted all of its prefill, or the lease ends."""
        await self._wait(lambda: self.is_read, math.inf, with_device=False)

    async def _wait(self, is_there: Callable[[], bool], limit_s: float, *, with_device: bool) -> None:
        """Wait for engine events; device progress is polled."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while not (is_there() or self.end_reason) and (left_s := end_s - loop.time()) > 0:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                pause_s = min(left_s, POLL_S) if with_device and self._is_pending else left_s
                await asyncio.wait([waiter], timeout=None if math.isinf(pause_s) else pause_s)
            finally:
                self._waiters.discard(waiter)

    @property
    def is_whole(self) -> bool:
        return self.is_read and self.loan.lent.ready == self.prompt.length

    @property
    def ready(self) -> int:
        """Return the number of final tokens in full blocks, or all tokens once complete."""
        if self.is_whole:
            return self.prompt.length
        ready = min(self.loan.lent.ready, self.prompt.length - 1)
        return ready // self.block_tokens * self.block_tokens

    @property
    def is_intact(self) -> bool:
        """Whether all memory whose location the reader has is still valid."""
        lent, (blocks, generations) = self.loan.lent, self._sent
        current = lent.blocks[: len(blocks)], lent.generations[: len(blocks)]
        return lent.intact and current == (blocks, generations)

    def open_response(self, num_cached: int) -> OpenResponse:
        """Return the location of the ready memory, from the first block the reader lacks."""
        lent, size, ready = self.loan.lent, self.block_tokens, self.ready
        is_whole = ready == self.prompt.length
        blocks = lent.blocks if is_whole else lent.blocks[: ready // size]
        if len(blocks) > len(self._sent[0]):
            self._sent = blocks, lent.generations[: len(blocks)]
        self.is_located = self.is_located or is_whole
        hidden_1D = lent.hidden_1D if is_whole else None
        return OpenResponse(
            lease=self.id,
            length=self.prompt.length,
            ready=ready,
            first=num_cached // size,
            blocks=list(blocks[num_cached // size :]),
            state=lent.state if is_whole else None,
            hidden=None if hidden_1D is None else HiddenState.of(hidden_1D),
        )

    @property
    def _is_pending(self) -> bool:
        """Whether the engine has submitted more than the device has finished."""
        lent = self.loan.lent
        return self.is_read or len(lent.blocks) * self.block_tokens > lent.ready
