"""After any order of take, share and release each slot keeps its bytes, and none is lost."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.slots import SlabKind

LAYOUT = Layout(
    kv=(KVShape(1, 3), KVShape(2, 5)),
    states=(StateShape(3, 16, 17, 3, 11), StateShape(2, 9, 8, 1, 7)),
    dtype=torch.bfloat16,
)
SLABS = 6
OWNERS = 5
PER_SLAB = {
    SlabKind.BLOCK: LAYOUT.blocks_per_slab,
    SlabKind.STATE: LAYOUT.states_per_slab,
    SlabKind.RECORD: LAYOUT.records_per_slab,
}
Slot = int | tuple[int, int]


@dataclass
class Live:
    """The model's record of a slot: its owners, its generation, and the pattern written into it."""

    owners: set[int]
    generation: int
    pattern: int


@dataclass
class Trial:
    """Drive an arena next to a model that is only a dictionary of live slots."""

    arena: Arena = field(
        default_factory=lambda: Arena(LAYOUT, (SLABS + 1) * LAYOUT.slab_bytes, torch.device("cpu"))
    )
    live: dict[tuple[SlabKind, Slot], Live] = field(default_factory=dict)
    generations: Counter[tuple[SlabKind, Slot]] = field(default_factory=Counter)
    patterns: count = field(default_factory=count)

    def __post_init__(self) -> None:
        self.arena.data.fill_(0xFF)  # NaN in every dtype

    def take(self, kind: SlabKind, owner: int, n: int) -> None:
        fits = self._fits({kind: n})
        assert self.arena.can_take(**{f"{kind}s": n}) == fits
        usage = self.arena.usage()
        if kind is SlabKind.BLOCK:
            slots = self.arena.take_blocks(owner, n)
        elif kind is SlabKind.RECORD:
            slots = self.arena.take_records(owner, n)
        else:
            state = self.arena.take_state(owner)
            slots = None if state is None else [state]
        assert (slots is not None) == fits
        if slots is None:
            assert self.arena.usage() == usage
            return
        assert len(set(slots)) == n
        for slot in slots:
            assert (kind, slot) not in self.live
            if kind is SlabKind.STATE:
                assert not any(part.any() for part in self._parts(kind, slot))
            self.generations[kind, slot] += 1
            pattern = next(self.patterns) % 251 + 1
            self.live[kind, slot] = Live({owner}, self.generations[kind, slot], pattern)
            for part in self._parts(kind, slot):
                part.fill_(pattern)

    def share(self, owner: int, pick: int) -> None:
        blocks = [
            slot
            for (kind, slot), live in self.live.items()
            if kind is SlabKind.BLOCK and owner not in live.owners
        ]
        if blocks:
            block = blocks[pick % len(blocks)]
            self.arena.share_block(owner, block)
            self.live[SlabKind.BLOCK, block].owners.add(owner)

    def release(self, kind: SlabKind, owner: int, pick: int, n: int) -> None:
        """Release up to n of the owner's slots, from the pick-th on."""
        held = self._held(owner, kind)
        if not held:
            return
        start = pick % len(held)
        chosen = held[start : start + (1 if kind is SlabKind.STATE else n)]
        for slot in chosen:
            self.verify(kind, slot)
        if kind is SlabKind.BLOCK:
            self.arena.release_blocks(owner, chosen)
        elif kind is SlabKind.RECORD:
            self.arena.release_records(owner, chosen)
        else:
            self.arena.release_state(owner, chosen[0])
        for slot in chosen:
            self._let_go(kind, slot, owner)

    def release_owner(self, owner: int) -> None:
        held = [(kind, slot) for kind in SlabKind for slot in self._held(owner, kind)]
        for kind, slot in held:
            self.verify(kind, slot)
        self.arena.release_owner(owner)
        for kind, slot in held:
            self._let_go(kind, slot, owner)

    def can_take(self, blocks: int, states: int, records: int) -> None:
        wanted = {SlabKind.BLOCK: blocks, SlabKind.STATE: states, SlabKind.RECORD: records}
        assert self.arena.can_take(blocks=blocks, states=states, records=records) == self._fits(wanted)

    def verify(self, kind: SlabKind, slot: Slot) -> None:
        """Check that a live slot still holds its pattern."""
        live = self.live[kind, slot]
        self.arena.check(kind, slot, live.generation)
        for part in self._parts(kind, slot):
            assert (part == live.pattern).all(), f"{kind} {slot} was overwritten"

    def verify_all(self) -> None:
        for kind, slot in self.live:
            self.verify(kind, slot)
        self.arena.check_integrity()
        usage, count = self.arena.usage(), Counter(kind for kind, _ in self.live)
        assert usage.block_bytes == count[SlabKind.BLOCK] * LAYOUT.block_bytes
        assert usage.state_bytes == count[SlabKind.STATE] * LAYOUT.state_bytes
        assert usage.record_bytes == count[SlabKind.RECORD] * LAYOUT.record_bytes
        serving = sum(len(self._serving(kind)) for kind in SlabKind)
        assert usage.free_bytes + serving * LAYOUT.slab_bytes == usage.capacity_bytes
        assert usage.free_slabs + serving == usage.slabs == SLABS

    def drain(self) -> None:
        for owner in range(OWNERS):
            self.release_owner(owner)
        assert not self.live
        self.verify_all()
        assert self.arena.usage().free_slabs == SLABS

    def _parts(self, kind: SlabKind, slot: Slot) -> list[torch.Tensor]:
        if kind is SlabKind.BLOCK:
            return [self.arena.pages(layer)[slot] for layer in range(len(LAYOUT.kv))]
        memories = [self.arena.recurrent(layer) for layer in range(len(LAYOUT.states))]
        if kind is SlabKind.STATE:
            return [part[slot] for memory in memories for part in (memory.state_SHKW, memory.window_SIC)]
        slab, place = slot
        return [part[slab, place] for memory in memories for part in memory[2:]]

    def _held(self, owner: int, kind: SlabKind) -> list[Slot]:
        return [slot for (k, slot), live in self.live.items() if k is kind and owner in live.owners]

    def _let_go(self, kind: SlabKind, slot: Slot, owner: int) -> None:
        live = self.live[kind, slot]
        live.owners.remove(owner)
        if not live.owners:
            del self.live[kind, slot]

    def _serving(self, kind: SlabKind) -> set[int]:
        slots = [slot for k, slot in self.live if k is kind]
        return {slot[0] if isinstance(slot, tuple) else slot // PER_SLAB[kind] for slot in slots}

    def _fits(self, wanted: dict[SlabKind, int]) -> bool:
        """Recount slabs: each class fills the holes in its own, then opens others."""
        free = SLABS
        for kind in SlabKind:
            slabs, live = len(self._serving(kind)), sum(k is kind for k, _ in self.live)
            needed = live + wanted.get(kind, 0)
            free -= max(slabs, -(-needed // PER_SLAB[kind]))
        return free >= 0


owners = st.integers(0, OWNERS - 1)
picks = st.integers(0, 99)
counts = st.integers(1, 2 * max(PER_SLAB.values()) + 1)


class ArenaMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.trial = Trial()

    @rule(owner=owners, n=counts)
    def take_blocks(self, owner: int, n: int) -> None:
        self.trial.take(SlabKind.BLOCK, owner, n)

    @rule(owner=owners)
    def take_state(self, owner: int) -> None:
        self.trial.take(SlabKind.STATE, owner, 1)

    @rule(owner=owners, n=counts)
    def take_records(self, owner: int, n: int) -> None:
        self.trial.take(SlabKind.RECORD, owner, n)

    @rule(owner=owners, pick=picks)
    def share(self, owner: int, pick: int) -> None:
        self.trial.share(owner, pick)

    @rule(kind=st.sampled_from(SlabKind), owner=owners, pick=picks, n=counts)
    def release(self, kind: SlabKind, owner: int, pick: int, n: int) -> None:
        self.trial.release(kind, owner, pick, n)

    @rule(owner=owners)
    def release_owner(self, owner: int) -> None:
        self.trial.release_owner(owner)

    @rule(blocks=st.integers(0, 20), states=st.integers(0, 4), records=st.integers(0, 20))
    def can_take(self, blocks: int, states: int, records: int) -> None:
        self.trial.can_take(blocks, states, records)

    @invariant()
    def contains(self) -> None:
        if hasattr(self, "trial"):
            self.trial.verify_all()

    def teardown(self) -> None:
        if hasattr(self, "trial"):
            self.trial.drain()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def run(trial: Trial, operations: int, seed: int) -> Counter[str]:
    """Run random operations, with a full check after each hundred; return how often each was run."""
    random, done = Random(seed), Counter[str]()
    for step in range(1, operations + 1):
        owner, pick, n = random.randrange(OWNERS), random.randrange(100), random.choice([1, 1, 2, 3, 7])
        kind = random.choice([SlabKind.BLOCK, SlabKind.BLOCK, SlabKind.RECORD, SlabKind.STATE])
        operation: Callable[[], None] = random.choices(
            [
                lambda kind=kind, owner=owner, n=n: trial.take(
                    kind, owner, 1 if kind is SlabKind.STATE else n
                ),
                lambda owner=owner, pick=pick: trial.share(owner, pick),
                lambda kind=kind, owner=owner, pick=pick, n=n: trial.release(kind, owner, pick, n),
                lambda owner=owner: trial.release_owner(owner),
                lambda n=n, pick=pick: trial.can_take(n, pick % 4, pick % 9),
            ],
            weights=[30, 10, 35, 15, 10],
        )[0]
        operation()
        if step % 100 == 0:
            trial.verify_all()
            done["full" if not trial._fits({SlabKind.STATE: 1}) else "roomy"] += 1
    trial.drain()
    return done


def test_twenty_thousand_random_operations_lose_and_mix_up_nothing() -> None:
    states = run(Trial(), 20_000, seed=0)
    assert min(states["full"], states["roomy"]) >= 20, f"the run should meet both: {states}"


def _views_overlap(trial: Trial) -> None:
    """Halve the second layer's block stride, so that its blocks overlap."""
    page = trial.arena._pages[1]
    strides = (page.stride(0) // 2, *page.stride()[1:])
    trial.arena._pages = (trial.arena._pages[0], page.as_strided(page.shape, strides, page.storage_offset()))


def _states_are_not_cleared(trial: Trial) -> None:
    trial.arena._slab_bytes_SX = torch.empty_like(trial.arena._slab_bytes_SX)


def _sharing_is_not_counted(trial: Trial) -> None:
    pool = trial.arena._blocks

    def share(owner: int, block: int) -> None:
        pool.held.setdefault(owner, {})[block] = pool.generations[block]

    pool.share = share


def _generations_stand_still(trial: Trial) -> None:
    class Frozen(list):
        def __setitem__(self, slot: int, generation: int) -> None:
            super().__setitem__(slot, 1)

    trial.arena._blocks.generations = Frozen(trial.arena._blocks.generations)


def _empty_slabs_are_kept(trial: Trial) -> None:
    trial.arena._slabs.close = lambda slab: None


MUTANTS = [
    _views_overlap,
    _states_are_not_cleared,
    _sharing_is_not_counted,
    _generations_stand_still,
    _empty_slabs_are_kept,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__.strip("_"))
def test_the_random_run_rejects_a_mutant(mutate: Callable[[Trial], None]) -> None:
    trial = Trial()
    mutate(trial)
    with pytest.raises((AssertionError, KeyError)):
        run(trial, 2_000, seed=1)
