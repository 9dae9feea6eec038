"""Prefill prompts for other servers, and return how to fetch them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

from specdec.core.outputs import RequestStats
from specdec.core.params import PreparedPrompt
from specdec.engine.incoming import WORTH_FETCHING
from specdec.engine.kv_transfer import LentPrefix
from specdec.engine.transfers import PrefixLoan, Transfers
from specdec.reach.lease import TransferLease
from specdec.reach.lease_table import LeaseTable
from specdec.reach.protocol import PrefixIdentity, ReachError, Secret
from specdec.server.failures import Failure
from specdec.server.reach.bodies import VERSION, Asked, LendFields

BUSY = {"Retry-After": "1"}
POLL_S = 0.02
"""Poll interval for memory held for others."""


class PromptLoan:
    """A prompt prefilled for another server; a single-token prompt has nothing to lend."""

    def __init__(
        self,
        leases: LeaseTable,
        prepared: PreparedPrompt,
        lease: TransferLease | None = None,
        loan: PrefixLoan | None = None,
    ) -> None:
        self._leases, self._prepared, self._loan = leases, prepared, loan
        self.lease = lease

    async def read(self) -> RequestStats:
        """Wait for the prefill and return its statistics; raise if it failed."""
        if self.lease:
            with refusing():
                await self._leases.finish(self.lease)
        stats = self._loan.stats if self._loan else None
        return stats or RequestStats(prompt_tokens=len(self._prepared.ids), output_tokens=0)

    def give_up(self) -> None:
        """Stop the prefill and release its memory."""
        if self.lease:
            self._leases.cancel(self.lease)


class Lender:
    """Starts prefills for other servers. Owned by the event loop's thread."""

    def __init__(
        self,
        secret: Secret,
        transfers: Transfers,
        leases: LeaseTable,
        host: str,
        port: int,
        *,
        most_bytes: int,
        share: Callable[[str], float] = lambda caller: 1.0,
    ) -> None:
        """Hold at most `most_bytes`, and per caller at most its `share` of that."""
        self._secret, self._transfers = secret, transfers
        self._host, self._port, self._max_bytes, self._share = host, port, most_bytes, share
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by caller, held by its request that waits for memory; its later requests queue."""
        self.book = leases

    async def lend(self, prepared: Sequence[PreparedPrompt], rooms: Sequence[int] | None) -> list[PromptLoan]:
        """Prefill prompts for another server, which finds them by rooms or `transfer_params`.

        They start together once memory is available, so no request holds some while waiting for more. If all
        readers of the rooms have left meanwhile, nothing is prefilled: its memory would be wasted, and later
        readers would leave too. Requests of one caller queue behind each other, not before those of others.
        """
        caller = prepared[0].terms.tenant.caller
        lock = self._turns.setdefault(caller, asyncio.Lock())
        needed = sum(map(self._bytes_of, prepared))
        if needed > (most_bytes := self._max_bytes_of(caller)):
            raise Failure(
                503,
                f"prompt: to hold it for another server takes {needed:,} bytes, of at most "
                f"{most_bytes:,}; send fewer or shorter ones, or raise memory_bytes.",
                param="prompt",
                code="capacity",
            )
        with self.book.rooms.expecting(rooms or ()):
            async with lock:
                while not (self._has_room(needed, caller) or self._are_left(rooms)):
                    await asyncio.sleep(POLL_S)
            if rooms and self._are_left(rooms):
                self.refuse(rooms)
                return [PromptLoan(self.book, prompt) for prompt in prepared]
        return self._begin(prepared, rooms)

    async def lend_cached(self, prepared: Sequence[PreparedPrompt]) -> list[PromptLoan]:
        """Lend the cached prefixes that are worth fetching, without prefill or waiting."""
        cached = [asyncio.wrap_future(self._transfers.cached(prompt)) for prompt in prepared]
        lengths = [length if length >= WORTH_FETCHING else 0 for length in await asyncio.gather(*cached)]
        cached_prompts = [_begun(prompt, length) for prompt, length in zip(prepared, lengths, strict=True)]
        is_awaited = any(lock.locked() for lock in self._turns.values())
        caller = prepared[0].terms.tenant.caller
        if is_awaited or not self._has_room(sum(map(self._bytes_of, cached_prompts)), caller):
            cached_prompts = [_begun(prompt, 0) for prompt in prepared]
        return self._begin(cached_prompts)

    def _bytes_of(self, prepared: PreparedPrompt) -> int:
        return self.book.charge(self._transfers.arena.layout.sequence_bytes(len(prepared.ids) - 1))

    def _max_bytes_of(self, caller: str) -> int:
        return int(self._share(caller) * self._max_bytes)

    def _has_room(self, num_bytes: int, caller: str) -> bool:
        """Return whether this much may be held now, within the caller's and the total limit."""
        if self.book.held_by(caller) + num_bytes > self._max_bytes_of(caller):
            return False
        return self.book.figures.held_bytes + num_bytes <= self._max_bytes

    def _are_left(self, rooms: Sequence[int] | None) -> bool:
        return bool(rooms) and all(map(self.book.rooms.is_left, rooms or ()))

    def _begin(
        self, prepared: Sequence[PreparedPrompt], rooms: Sequence[int] | None = None
    ) -> list[PromptLoan]:
        places: Sequence[int | None] = rooms or [None] * len(prepared)
        loaned: list[PromptLoan] = []
        try:
            for prompt, room in zip(prepared, places, strict=True):
                loaned.append(self._lend(prompt, room))
        except BaseException:
            for loan in loaned:
                loan.give_up()
            raise
        return loaned

    def _lend(self, prepared: PreparedPrompt, room: int | None) -> PromptLoan:
        prompt = PrefixIdentity.of(prepared.ids[:-1], prepared.params.cache_salt or "")
        if not prompt.length:
            self.refuse([room])
            return PromptLoan(self.book, prepared)
        loans: list[PrefixLoan] = []

        def submit(on_change: Callable[[LentPrefix], None]) -> PrefixLoan:
            loans.append(self._transfers.lend(prepared, on_change))
            return loans[0]

        caller, num_bytes = prepared.terms.tenant.caller, self._bytes_of(prepared)
        with refusing():
            lease = self.book.lend(submit, prompt, num_bytes=num_bytes, room=room, caller=caller)
        return PromptLoan(self.book, prepared, lease, loans[0])

    def transfer_params(self, loaned: Sequence[PromptLoan]) -> dict[str, Any]:
        """Return `kv_transfer_params` for the router, signed by this server."""
        leases = [loan.lease for loan in loaned if loan.lease]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.book.engine,
            "remote_request_id": leases[0].id if leases else None,
            "remote_host": self._host,
            "remote_port": self._port,
            "remote_block_ids": [],
            "tp_size": 1,
            "remote_num_tokens": leases[0].prompt.length if leases else 0,
            "transfer_mode": "pull",
            "specdec": {
                "v": VERSION,
                "leases": [loan.lease and self._signed(loan.lease) for loan in loaned],
                "expires_in": min(map(self.book.expires_in, leases), default=0.0),
            },
        }

    def _signed(self, lease: TransferLease) -> dict[str, Any]:
        mac = self._secret.sign(self.book.engine, lease.id, lease.prompt)
        return {"lease": lease.id, "mac": mac, "tokens": lease.prompt.length}

    def refuse(self, rooms: Sequence[int | None]) -> None:
        """Notify readers waiting for these rooms that their prompts are not prefilled."""
        for room in rooms:
            if room is not None:
                self.book.rooms.fail(room)

    @contextlib.contextmanager
    def notifying_readers(self, transfer: Asked | None) -> Iterator[None]:
        """If the context raises, notify readers waiting for the request's rooms."""
        try:
            yield
        except BaseException:
            if isinstance(transfer, LendFields):
                self.refuse(transfer.rooms or ())
            raise


def _begun(prepared: PreparedPrompt, length: int) -> PreparedPrompt:
    """Return a prompt cut to lend `length` tokens, all but its last one."""
    return prepared._replace(ids=prepared.ids[: length + 1])


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Convert refusals of the book to client errors."""
    try:
        yield
    except ReachError as refusal:
        match refusal.reason:
            case "busy":
                raise Failure(503, str(refusal), code="too_many_requests", headers=BUSY) from None
            case "room_used":
                raise Failure(409, str(refusal), param=refusal.field, code="room_used") from None
            case _:
                raise Failure(503, str(refusal), code=refusal.reason) from None
