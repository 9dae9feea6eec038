"""Cached prefixes as shown to routers: a hash and a length per cached state."""

import asyncio
import hashlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, Strict

from specdec.engine.transfers import Transfers
from specdec.reach.messages import MOST_TOKENS, TOKENS, ChannelMessage, Id
from specdec.reach.protocol import new_id
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.tree import Ids, PrefixNode

CachedPrefix = tuple[int, int]
"""A prefix's hash, from `hash_prefixes`, and its length."""
MOST_CHANGES = 1 << 14
"""Maximum log entries; a router further behind gets a full answer."""
MOST_TOLD = 1 << 16
"""Maximum entries of an answer, some 30 bytes each, within the limit of `PeerClient`."""
MOST_HASHED, NODE = 1 << 20, 1 << 10
"""Maximum tokens of new states hashed per update, and the cost of a state in tokens: some 40 ms between two
steps. Later updates hash the rest: hashing 80,000 prefixes of 1,000 tokens stopped an engine for 3 s."""
REFRESH_S = 0.1
"""Minimum seconds between two scans of the cache, however often routers ask."""
LOOK_SHARE = 0.05
"""Maximum fraction of time for scans: one at 80,000 states blocks the engine thread for 0.1 s."""
HEX_16 = "16 hexadecimal digits in lower case"


def hash_prefixes(ids: Sequence[int] | NDArray[np.integer], salt: str = "") -> NDArray[np.uint64]:
    """Hash every prefix of a prompt at once: entry n - 1 covers the first n tokens.

    The hash is a sum of mixed (token, position) pairs modulo 2^64, so one cumulative sum suffices. It is only
    a routing hint: the engine compares tokens.
    """
    mixed = np.asarray(ids).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.arange(1, len(mixed) + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    for shift, factor in ((31, 0xBF58476D1CE4E5B9), (29, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(32)
    start = hashlib.sha256(salt.encode()).digest()[:8] if salt else bytes(8)
    sums: NDArray[np.uint64] = np.cumsum(mixed) + np.frombuffer(start, np.dtype("<u8"))[0]
    return sums


Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Length = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Entry = Annotated[tuple[Hash, Length], Strict(False)]
"""JSON has lists instead of tuples."""


class PrefixLogChanges(ChannelMessage):
    """Changes for a router: apply them to its entries at `since`, or to none if `whole`.

    Entries that came and went since then are in `gone`, though the router never saw them.
    """

    epoch: Id = Field(description="the engine's id; entries of another engine are void")
    seq: int = Field(ge=0, description="the `since` of the next request")
    whole: bool = Field(description="true if `added` is the full list, not the changes")
    left_out: int = Field(ge=0, description="the number of older states omitted from a full list")
    added: list[Entry] = Field(description=f"pairs of {HEX_16}, and {TOKENS}")
    gone: list[Entry] = Field(description=f"pairs of {HEX_16}, and {TOKENS}")


class CachedPrefixHashes:
    """Hashes of the cached prefixes that a request can continue."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._hashes: dict[int, tuple[PrefixNode, Ids, int]] = {}
        """By node id: the node, its edge when hashed, and its hash. A node that changes gets a new edge.

        Only the engine thread uses it.
        """

    async def now(self) -> Set[CachedPrefix]:
        """Return the cached prefixes as an immutable set."""
        return await asyncio.wrap_future(self._transfers.look(self._scan))

    def _scan(self, cache: PrefixCache) -> Set[CachedPrefix]:
        tiers = [cache, cache.lower] if cache.lower else [cache]
        previous, self._hashes, hashed = self._hashes, {}, 0
        for tree in (tier.tree for tier in tiers):
            for node in tree.nodes():
                if node.state is None and tree.arena.layout.states:
                    continue
                cached = previous.get(id(node))
                if cached is None or cached[0] is not node or cached[1] is not node.edge:
                    if hashed >= MOST_HASHED and (cached is None or cached[0] is not node):
                        continue  # a later scan hashes it
                    hashed += node.end + NODE
                    cached = (node, node.edge, _hash(tree.token_ids(node), node.tenant.salt))
                self._hashes[id(node)] = cached
        return frozenset((prefix, node.end) for node, _, prefix in self._hashes.values())


class CachedPrefixLog:
    """Change log of cached prefixes. Owned by the event loop's thread.

    `source` returns the cached prefixes as an immutable set.
    """

    def __init__(
        self,
        source: Callable[[], Awaitable[Set[CachedPrefix]]],
        *,
        epoch: str | None = None,
        most: int = MOST_CHANGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._clock = source, clock
        self.epoch = epoch or new_id()
        self._known: dict[CachedPrefix, None] = {}
        """Cached prefixes, the latest last."""
        self._changes: deque[tuple[CachedPrefix, bool]] = deque(maxlen=most)
        """Additions (True) and removals, the latest last; the last one's number is `_seq`."""
        self._seq = 0
        self._due_s = -math.inf
        """Earliest time of the next scan."""
        self._scanning = asyncio.Lock()

    async def since(self, seq: int) -> PrefixLogChanges:
        """Return the changes since an earlier answer's number; 0 requests everything."""
        await self._scan()
        num_missed = self._seq - seq
        if seq == 0 or not 0 <= num_missed <= len(self._changes):
            return self._answer(whole=True, added=[*self._known], gone=())
        last: dict[CachedPrefix, bool] = {}
        for i in range(len(self._changes) - num_missed, len(self._changes)):
            prefix, is_added = self._changes[i]
            last[prefix] = is_added
        added = [prefix for prefix, is_added in last.items() if is_added]
        return self._answer(whole=False, added=added, gone=last.keys() - set(added))

    async def _scan(self) -> None:
        async with self._scanning:
            start_s = self._clock()
            if start_s >= self._due_s:
                self._note(await self._source())
                took_s = self._clock() - start_s
                self._due_s = start_s + max(REFRESH_S, took_s / LOOK_SHARE)

    def _note(self, cached: Set[CachedPrefix]) -> None:
        """Log additions and removals."""
        added = cached - self._known.keys()
        for changed, is_added in ((self._known.keys() - cached, False), (added, True)):
            self._changes.extend((prefix, is_added) for prefix in changed)
            self._seq += len(changed)
        self._known = dict.fromkeys([*(prefix for prefix in self._known if prefix in cached), *added])

    def _answer(
        self, *, whole: bool, added: Sequence[CachedPrefix], gone: Set[CachedPrefix] | tuple[()]
    ) -> PrefixLogChanges:
        return PrefixLogChanges(
            epoch=self.epoch,
            seq=self._seq,
            whole=whole,
            left_out=max(len(added) - MOST_TOLD, 0),
            added=_entries(added[-MOST_TOLD:]),
            gone=_entries(gone),
        )


def _hash(ids: Ids, salt: str) -> int:
    return int(hash_prefixes(ids, salt)[-1])


def _entries(prefixes: Iterable[CachedPrefix]) -> list[tuple[str, int]]:
    return [(f"{prefix:016x}", length) for prefix, length in prefixes]
