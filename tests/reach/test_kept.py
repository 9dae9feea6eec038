"""The states that an engine reports to routers: prefix hashes, and a bounded log."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise

import numpy as np
import pytest

from specdec import SamplingParams, SpecEngine
from specdec.config.tenant import Tenant
from specdec.reach.peer_client import MOST_ANSWER_BYTES
from specdec.reach.prefix_log import (
    LOOK_SHARE,
    REFRESH_S,
    CachedPrefix,
    CachedPrefixHashes,
    CachedPrefixLog,
    PrefixLogChanges,
    hash_prefixes,
)
from specdec.reach.protocol import ReachError
from tests.reach.peers import Clock

WORD = (1 << 64) - 1


def of(source: Callable[[], Iterable[CachedPrefix]]) -> Callable[[], Awaitable[frozenset[CachedPrefix]]]:
    async def now() -> frozenset[CachedPrefix]:
        return frozenset(source())

    return now


def since(log: CachedPrefixLog, seq: int) -> PrefixLogChanges:
    return asyncio.run(log.since(seq))


def plain_hash(ids: list[int]) -> int:
    """Compute the hash with Python integers, one token at a time."""
    total = 0
    for place, token in enumerate(ids, 1):
        mixed = (token * 0x9E3779B97F4A7C15 & WORD) ^ (place * 0xD1B54A32D192ED03 & WORD)
        mixed ^= mixed >> 31
        mixed = mixed * 0xBF58476D1CE4E5B9 & WORD
        mixed ^= mixed >> 29
        mixed = mixed * 0x94D049BB133111EB & WORD
        total += mixed ^ mixed >> 32
    return total & WORD


def test_every_beginning_has_its_hash_at_once() -> None:
    ids = np.random.default_rng(0).integers(0, 150_000, 257).tolist()
    hashes = hash_prefixes(ids)
    assert hashes.dtype == np.uint64
    assert [int(own) for own in hashes[[0, 1, 63, 256]]] == [plain_hash(ids[:n]) for n in (1, 2, 64, 257)]
    assert np.array_equal(hash_prefixes(ids[:64]), hashes[:64])
    assert len(hash_prefixes([])) == 0
    assert (
        len({int(own) for own in [*hashes, *hash_prefixes(ids[::-1])[:-1], *hash_prefixes(ids, "s")]})
        == 3 * 257 - 1
    )


def test_a_polling_router_knows_the_cached_prefixes() -> None:
    """Random changes, with routers that poll at different times and fall behind."""
    draw, clock, kept = random.Random(0), Clock(), set()
    log = CachedPrefixLog(of(lambda: kept), most=40, clock=clock)
    routers = [(set(), 0)] * 4
    for _ in range(400):
        for _ in range(draw.randrange(4)):
            kept ^= {(draw.randrange(30), draw.randrange(1, 3))}
        clock.now_s += 2 * REFRESH_S
        which = draw.choices(range(4), (8, 4, 2, 1))[0]
        known, seq = routers[which]
        told = PrefixLogChanges.from_json(since(log, seq).write())
        assert told.epoch == log.epoch
        known = set() if told.whole else set(known)
        added, gone = (
            {(int(prefix, 16), length) for prefix, length in own} for own in (told.added, told.gone)
        )
        known = (known - gone) | added
        assert known == kept
        routers[which] = known, told.seq
    assert len(log._changes) == 40


def test_another_epoch_or_an_old_position_gets_the_full_list() -> None:
    clock, kept = Clock(), {(5, 7)}
    log = CachedPrefixLog(of(lambda: kept), most=2, clock=clock)
    first = since(log, 0)
    for strange in ([["0" * 16, "7"]], [["0" * 16]], [["0" * 16, 0]], [["x" * 16, 1]], ["0" * 16], {"a": 1}):
        with pytest.raises(ReachError, match="added"):
            PrefixLogChanges.from_json(json.dumps(first.model_dump() | {"added": strange}).encode())
    assert first.whole and first.added == [("0000000000000005", 7)] and first.gone == []
    same = since(log, first.seq)
    assert not same.whole and same.added == same.gone == []
    assert since(log, first.seq + 1).whole and since(log, 10**18).whole
    kept |= {(6, 7), (7, 7), (8, 7)}
    assert not since(log, first.seq).added, "it does not look at the cache each time"
    clock.now_s += 2 * REFRESH_S
    assert since(log, first.seq).whole
    kept.clear()
    clock.now_s += 2 * REFRESH_S
    assert since(log, 0).whole and since(log, 0).added == []


def test_a_whole_answer_names_the_latest_states_and_counts_the_others() -> None:
    """At their longest, 65,536 of them are as many as the client reads."""
    clock, kept = Clock(), {(WORD - own, 1 << 24) for own in range(100_000)}
    log = CachedPrefixLog(of(lambda: kept), clock=clock)
    since(log, 0)
    kept |= {(own, 1 << 24) for own in range(10)}
    clock.now_s += 2 * REFRESH_S
    told = since(log, 0)
    assert len(told.write()) + 100 < MOST_ANSWER_BYTES
    assert (told.whole, len(told.added), told.left_out) == (True, 1 << 16, 100_010 - (1 << 16))
    assert {prefix for prefix, _ in told.added} >= {f"{own:016x}" for own in range(10)}
    kept -= {(5, 1 << 24)}
    clock.now_s += 2 * REFRESH_S
    then = since(log, told.seq)
    assert (then.whole, then.added, then.left_out) == (False, [], 0)
    assert then.gone == [("0000000000000005", 1 << 24)]


def test_the_epoch_is_another_one_for_each_log() -> None:
    assert CachedPrefixLog(of(set)).epoch != CachedPrefixLog(of(set)).epoch


@pytest.mark.parametrize("most", [1, 3])
def test_prefixes_added_and_removed_between_polls_are_listed_as_gone(most: int) -> None:
    clock, kept = Clock(), set()
    log = CachedPrefixLog(of(lambda: kept), most=most, clock=clock)
    seq = since(log, 0).seq
    assert seq == 0
    for own in ({(1, 1)}, set(), {(1, 1)}):
        clock.now_s += 2 * REFRESH_S
        kept = own
        since(log, 0)
    told = since(log, 2)
    assert not told.whole and told.added == [("0000000000000001", 1)] and not told.gone


def test_many_states_are_hashed_in_several_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine makes no step during a scan."""
    draw = np.random.default_rng(2)
    with SpecEngine("tiny", memory_bytes=64 << 20, draft="none", dtype="float32") as engine:
        params = SamplingParams(max_tokens=2)
        engine.generate([draw.integers(5, 300, 140).tolist() for _ in range(5)], params)
        whole = asyncio.run(CachedPrefixHashes(engine.transfers).now())
        monkeypatch.setattr("specdec.reach.prefix_log.MOST_HASHED", 1)
        states, known = CachedPrefixHashes(engine.transfers), []
        while not known or len(known[-1]) < len(whole):
            known.append(asyncio.run(states.now()))
        assert [len(own) for own in known] == [*range(1, len(whole) + 1)] and len(whole) > 4
        assert known[-1] == whole


def test_an_engine_lists_the_prefixes_a_request_can_continue() -> None:
    """Prompts that share prefixes, so that nodes are split, under two salts."""
    draw = np.random.default_rng(1)
    trunk = draw.integers(5, 300, 90).tolist()
    prompts = [trunk[:length] + draw.integers(5, 300, 40).tolist() for length in (0, 30, 60, 90, 90, 60)]
    with SpecEngine("tiny", memory_bytes=128 << 20, draft="none", dtype="float32") as engine:
        states = CachedPrefixHashes(engine.transfers)
        turns = []
        for place, prompt in enumerate(prompts):
            salt = "salt" if place == 5 else None
            params = SamplingParams(max_tokens=2, temperature=0.0, cache_salt=salt)
            turns.append([*prompt, *engine.generate([prompt], params)[0].token_ids, 9])
            kept = asyncio.run(states.now())
            assert kept == asyncio.run(CachedPrefixHashes(engine.transfers).now()), "as if hashed anew"
        cache = engine.transfers.look(lambda cache: cache).result()
        for turn, salt in zip([*prompts, *turns], 2 * ([""] * 5 + ["salt"]), strict=True):
            known = [n for n, own in enumerate(hash_prefixes(turn, salt), 1) if (int(own), n) in kept]
            assert max(known, default=0) == cache.longest(Tenant(salt=salt), turn)
        assert cache.longest(Tenant(), turns[4]) > cache.longest(Tenant(), prompts[4]) == 130
        engine.flush()
        assert not asyncio.run(states.now()) and not states._hashes


def test_looks_that_take_long_are_rare() -> None:
    """Each scan blocks the engine's thread."""
    clock, looks = Clock(), list[float]()

    async def look() -> set[CachedPrefix]:
        looks.append(clock.now_s)
        clock.now_s += 2 * REFRESH_S
        return set()

    log = CachedPrefixLog(look, clock=clock)
    for _ in range(1000):
        since(log, 1)
        clock.now_s += REFRESH_S / 10
    apart = [later - earlier for earlier, later in pairwise(looks)]
    assert len(looks) > 2 and min(apart) == pytest.approx(2 * REFRESH_S / LOOK_SHARE, rel=0.01)
