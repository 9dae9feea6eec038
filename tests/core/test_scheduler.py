"""Scheduling without a model: admission, preemption and callbacks."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config.sampling import SamplingParams
from specdec.config.tenant import SOLE, Tenant
from specdec.core.outputs import Delta
from specdec.core.request import OutputToken, Request
from specdec.core.scheduler import Scheduler
from specdec.core.speculation import Speculation
from specdec.draft.policy import Policy
from specdec.draft.proposal import DraftShape
from specdec.errors import CapacityError, SpecdecError
from specdec.kernels.table import load_kernels
from specdec.setup.warmup import WarmupDrafter
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import BACKINGS, CommittedState, release_path
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.verify.sampler import TokenSampler

LAYOUT = Layout((KVShape(1, 16),), (StateShape(2, 8, 16, 3, 40),), torch.float32, block_tokens=4)
LONGEST = 64
TOKEN = 7
"""Every step's output."""


@dataclass
class Bench:
    """A scheduler over some slabs, with a record of its callbacks."""

    slabs: int = 12
    max_running: int = 8
    chunk_tokens: int = 64
    lost: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    told: dict[int, list[Delta | SpecdecError]] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        self.arena = Arena(LAYOUT, (self.slabs + 1) * LAYOUT.slab_bytes, torch.device("cpu"))
        self.scheduler = Scheduler(
            self.arena, self, max_running=self.max_running, chunk_tokens=self.chunk_tokens
        )

    def fold(self, committed: Sequence[CommittedState]) -> None:
        raise AssertionError("no request has a path")

    def submit(self, number: int, prompt: int, max_tokens: int = 8, tenant: Tenant = SOLE) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        tokens, self.told[number] = [TOKEN] * prompt, []
        request = Request(
            number,
            tokens,
            params,
            chooser=TokenSampler(params, seed=0, prompt=tokens, vocab=10),
            text=None,
            stop_ids={},
            max_length=LONGEST,
            emit=self.told[number].append,
            tenant=tenant,
        )
        self.scheduler.submit(request)
        return request

    def step(self) -> list[tuple[int, int]]:
        """Plan a step, compute it, emit a token for completed rows; return the tokens computed by row."""
        plan, self.steps = self.scheduler.schedule(), self.steps + 1
        for row in plan.rows:
            row.request.num_computed_tokens += row.num_tokens
        self.scheduler.charge(row.request for row in plan.rows)
        for row in plan.rows:
            request = row.request
            # Scheduled tokens have their blocks.
            assert (
                len(request.table_N) >= LAYOUT.blocks_for(request.num_computed_tokens) and request.committed
            )
            if not request.num_uncomputed_tokens:
                request.accept([OutputToken(TOKEN)])
            if request.finish_reason:
                self._end(request)
                self.scheduler.release(request)
                request.send(request.take_delta())
        for request in plan.events.dropped:
            self._end(request)
        self.lost += [request.number for request in plan.events.preempted]
        self.arena.check_integrity()
        return [(row.request.number, row.num_tokens) for row in plan.rows]

    def _end(self, request: Request) -> None:
        self.ended.append(request.number)
        self.lost.append(request.number)

    def is_empty(self) -> bool:
        return self.arena.usage().free_slabs == self.arena.usage().slabs


def fill(bench: Bench) -> None:
    """Allocate every free block and state to an unrelated owner."""
    while bench.arena.take_blocks("stranger", 1) is not None:
        pass


def test_rows_that_decode_take_part_and_prompts_share_the_budget_in_order() -> None:
    bench = Bench(chunk_tokens=10)
    bench.submit(1, prompt=3)
    assert bench.step() == [(1, 3)]
    for number in (2, 3, 4):
        bench.submit(number, prompt=8)
    assert bench.step() == [(1, 1), (2, 8), (3, 2)]
    assert bench.step() == [(1, 1), (2, 1), (3, 6), (4, 4)]


def test_reserving_gets_only_what_is_missing() -> None:
    bench = Bench()
    request = bench.submit(1, prompt=6)
    bench.step()
    before = request.table_N.tolist()
    assert len(before) == 2
    assert bench.scheduler.reserve(request, 8) and request.table_N.tolist() == before
    assert bench.scheduler.reserve(request, 13)
    assert request.table_N.tolist()[:2] == before and len(request.table_N) == 4
    bench.arena.check_integrity()


def test_what_cannot_be_reserved_whole_is_not_reserved_in_part() -> None:
    bench = Bench()
    request = bench.submit(1, prompt=6)
    bench.step()
    fill(bench)
    usage, before = bench.arena.usage(), request.table_N.tolist()
    assert not bench.scheduler.reserve(request, 9)
    assert bench.scheduler.reserve(request, 8)
    assert request.table_N.tolist() == before and bench.arena.usage() == usage
    assert bench.scheduler.limited_by["draft blocks"] == 1 and bench.scheduler.preemptions == 0


@pytest.mark.parametrize("reserved", [0, 1, 9, 30])
def test_trimming_leaves_the_blocks_of_the_tokens(reserved: int) -> None:
    bench = Bench()
    request = bench.submit(1, prompt=7)
    bench.step()
    bench.scheduler.reserve(request, len(request.tokens) + reserved)
    before, needed = request.table_N.tolist(), LAYOUT.blocks_for(8)
    assert bench.scheduler.trim(request) == (len(before) > needed)
    assert request.table_N.tolist() == before[:needed]
    assert bench.arena.usage().block_bytes == needed * LAYOUT.block_bytes
    assert not bench.scheduler.trim(request)
    bench.arena.check_integrity()


def test_what_drafts_hold_is_reclaimed_before_anyone_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    first, second = bench.submit(1, prompt=4, max_tokens=20), bench.submit(2, prompt=4, max_tokens=20)
    bench.step()
    bench.scheduler.reserve(second, LONGEST)
    fill(bench)
    reclaimed, reclaim = list[bool](), bench.scheduler.reclaim
    monkeypatch.setattr(bench.scheduler, "reclaim", lambda: reclaimed.append(reclaim()) or reclaimed[-1])
    while first.output_length < 12:
        bench.step()
    assert reclaimed == [True] and bench.scheduler.preemptions == 0 and not bench.lost


def test_what_drafts_hold_is_reclaimed_before_anyone_waits() -> None:
    bench = Bench(slabs=4)
    first = bench.submit(1, prompt=4)
    bench.step()
    bench.scheduler.reserve(first, 3 * LAYOUT.blocks_per_slab * LAYOUT.block_tokens)
    assert bench.arena.usage().free_slabs == 0
    bench.submit(2, prompt=4)
    assert [number for number, _ in bench.step()] == [1, 2]
    assert not bench.scheduler.limited_by


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    bench = Bench(slabs=6)
    for number in (1, 2, 3):
        bench.submit(number, prompt=4, max_tokens=30)
    bench.step()
    bench.submit(4, prompt=4)
    fill(bench)
    while not bench.scheduler.preemptions:
        bench.step()
    assert bench.lost == [3] and not bench.ended
    assert [request.number for request in bench.scheduler.waiting] == [3, 4]
    assert [request.number for request in bench.scheduler.running] == [1, 2]
    bench.arena.release_owner("stranger")
    again = dict(bench.step())
    assert again[3] > 4, "it reads its prompt and what it had said"


def test_a_request_is_queued_until_it_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(1.0)
    monkeypatch.setattr("specdec.core.request.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    bench = Bench(max_running=1)
    first, second = (bench.submit(number, prompt=4, max_tokens=3) for number in (1, 2))
    while not first.finish_reason:
        bench.step()
        assert 0 < first.queued_s < first.first_token_s and not second.queued_s
    bench.step()
    waited = second.queued_s
    assert waited > first.first_token_s
    bench.scheduler.preempt(second)
    while not second.finish_reason:
        bench.step()
        assert second.queued_s == waited < second.first_token_s


def cancel(bench: Bench, request: Request) -> None:
    request.cancelled = True


def preempt_and_cancel(bench: Bench, request: Request) -> None:
    bench.scheduler.preempt(request)
    request.cancelled = True


ENDS: dict[str, Callable[[Bench, Request], None]] = {
    "it has said all": lambda bench, request: None,
    "it is cancelled while it runs": cancel,
    "it is cancelled after it was preempted": preempt_and_cancel,
}


@pytest.mark.parametrize("end", ENDS)
def test_whoever_ends_is_told_of_once(end: str) -> None:
    bench = Bench()
    request, other = bench.submit(1, prompt=4, max_tokens=3), bench.submit(2, prompt=4, max_tokens=20)
    bench.step()
    ENDS[end](bench, request)
    for _ in range(6):
        bench.step()
    assert bench.ended == [1] and bench.lost[-1] == 1
    assert request.finish_reason == ("length" if end == "it has said all" else "abort")
    last = bench.told[1][-1]
    assert isinstance(last, Delta) and last.finish_reason == request.finish_reason
    assert other.finish_reason is None and bench.lost.count(2) == 0


def test_who_is_cancelled_before_it_ran_is_told_of_once() -> None:
    bench = Bench(max_running=1)
    bench.submit(1, prompt=4)
    bench.step()
    bench.submit(2, prompt=4).cancelled = True
    for _ in range(3):
        bench.step()
    assert bench.ended == [2] and not bench.scheduler.waiting


def test_what_can_never_fit_is_refused_and_told_of_once() -> None:
    bench = Bench(slabs=2)
    bench.submit(1, prompt=40)
    bench.submit(2, prompt=4, max_tokens=3)
    while bench.scheduler.has_work:
        bench.step()
    assert isinstance(bench.told[1][0], CapacityError) and len(bench.told[1]) == 1
    assert bench.is_empty() and bench.ended == [1, 2]


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_every_request_ends_once_and_nothing_stays(seed: int) -> None:
    rng = Random(seed)
    bench = Bench(slabs=rng.randint(4, 12), max_running=rng.randint(1, 5), chunk_tokens=rng.randint(1, 40))
    requests: list[Request] = []
    fitting = (bench.slabs - 1) * LAYOUT.blocks_per_slab * LAYOUT.block_tokens
    while len(requests) < 12 or bench.scheduler.has_work:
        assert bench.steps < 5000
        if len(requests) < 12 and rng.random() < 0.4:
            requests.append(bench.submit(len(requests), rng.randint(1, min(fitting, 40) - 9)))
        for request in bench.scheduler.running:
            if rng.random() < 0.2:
                bench.scheduler.reserve(request, len(request.tokens) + rng.randint(0, 20))
        if requests and rng.random() < 0.05:
            requests[rng.randrange(len(requests))].cancelled = True
        bench.step()
    assert bench.is_empty()
    assert sorted(bench.ended) == [request.number for request in requests]
    assert bench.scheduler.preemptions == sum(request.preemptions for request in requests)
    assert Counter(bench.lost) == Counter({r.number: 1 + r.preemptions for r in requests})


@pytest.mark.parametrize("backing", ["record", "snapshot"])
def test_draft_slots_shrink_before_anyone_waits(backing: str) -> None:
    """A draft uses the free slots, however few, and no row loses anything by it."""
    shape, sizes = DraftShape(8, 1, 9), set[int]()
    per_slab = LAYOUT.records_per_slab if backing == "record" else 1
    for spare in range(14):
        bench = Bench(slabs=24)
        slots = BACKINGS[backing](bench.arena)
        speculation = Speculation(Policy(shape, adaptive=False), slots, bench.scheduler, load_kernels("cpu"))
        speculation.add_drafter(WarmupDrafter(10))
        rows = [bench.submit(number, prompt=4, max_tokens=40) for number in (1, 2)]
        bench.step()
        for request in rows:
            assert bench.scheduler.reserve(request, 20)
        while bench.arena.usage().free_slabs > spare // per_slab:
            assert bench.arena.take_state("stranger") is not None
        drafts = speculation.draft(bench.scheduler.schedule().rows)
        own = [len(draft.tree) if draft else 0 for draft in drafts]
        sizes.update(own)
        assert (own == [9, 9]) == (bench.scheduler.limited_by["draft slots"] == 0)
        assert bench.scheduler.running == rows and bench.scheduler.preemptions == 0
        for request, draft in zip(rows, drafts, strict=True):
            if draft and request.committed:
                assert draft.tree.parents == tuple(range(-1, len(draft.tree) - 1))
                held = slots.promote(request.number, request.committed, draft.slots, [0])
                request.committed = release_path(bench.arena, request.number, held)
        bench.arena.check_integrity()
    assert {0, 9} < sizes and len(sizes) > 3
