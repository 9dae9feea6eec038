"""The policy finds what pays: no, deep or intermediate drafts, for each row, and again after changes."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.acceptance import TrackRecord
from specdec.draft.policy import LOOKUP_SHARE, Policy, StepBatch
from specdec.draft.proposal import DraftShape, Proposal
from specdec.draft.repetition import RepetitionIndex
from tests.draft.naive import paths, proposals
from tests.draft.simulation import ROOM, Costs, Outcome, Rate, World, jitter, neighbour

CHAIN, TREE = DraftShape(7, 1, 8), DraftShape(3, 4, 8)
TOKENS_DOMINATE = Costs(step=1, token=4, level=1)
WIDTH_IS_CHEAP = Costs(step=20, token=0.02, level=0.5)
BETWEEN = Costs(step=50, token=1.5, level=4)
SETTLED, MEASURED = 400, 1000
"""Warm-up steps, and steps measured."""
NEARLY = 0.93
"""Required share of the best fixed shape's rate; the rest is the cost of learning."""


def always(rate: float) -> Rate:
    return lambda row, step: rate


def world(bounds: DraftShape, costs: Costs, rate: Rate, rows: int = 1, *, adaptive: bool = True) -> World:
    return World(Policy(bounds, adaptive=adaptive), costs, rate, rows)


def settled(bounds: DraftShape, costs: Costs, rate: Rate, rows: int = 1) -> Outcome:
    learning = world(bounds, costs, rate, rows)
    shorter = 1 if rows == 1 else 5
    learning.run(SETTLED // shorter)
    return learning.run(MEASURED // shorter)


def chain_rate(costs: Costs, rate: float, depth: int, *, drafting: int = 1, rows: int = 1) -> float:
    """Return the token rate if some rows always draft a chain of one depth."""
    tokens = rows + drafting * sum(rate**level for level in range(1, depth + 1))
    return tokens / (costs.verify(rows + drafting * depth) + costs.level * depth * bool(drafting))


def best_rate(costs: Costs, rate: float, deepest: int, *, drafting: int = 1, rows: int = 1) -> float:
    depths = range(deepest + 1)
    return max(chain_rate(costs, rate, depth, drafting=drafting, rows=rows) for depth in depths)


def mean_depth(outcome: Outcome) -> float:
    return sum(depth * count for depth, count in outcome.asked.items()) / outcome.asked.total()


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("rate", [0.02, 0.6])
def test_where_tokens_cost_and_few_are_accepted_nothing_is_wasted(rate: float, rows: int) -> None:
    found = settled(CHAIN, TOKENS_DOMINATE, always(rate), rows)
    assert found.waste <= 0.02
    assert found.rate >= 0.98 * chain_rate(TOKENS_DOMINATE, rate, 0, rows=rows)
    assert sum(found.asked.values()) > found.asked[0] > 0.9 * found.asked.total()


@pytest.mark.parametrize("costs", [WIDTH_IS_CHEAP, BETWEEN])
@pytest.mark.parametrize("rate", [0.02, 0.2, 0.5, 0.7, 0.95])
def test_one_row_earns_what_the_best_fixed_depth_would(rate: float, costs: Costs) -> None:
    found = settled(CHAIN, costs, always(rate))
    assert found.rate >= NEARLY * best_rate(costs, rate, CHAIN.num_steps)


def test_the_better_drafts_are_the_deeper_they_go() -> None:
    depths = [mean_depth(settled(CHAIN, BETWEEN, always(rate))) for rate in (0.02, 0.5, 0.98)]
    assert depths[0] < 0.3 and 1 < depths[1] < 4 and depths[2] > 6


@pytest.mark.parametrize(
    ("rate", "costs", "pays"),
    [(0.05, BETWEEN, False), (0.4, WIDTH_IS_CHEAP, True), (0.8, WIDTH_IS_CHEAP, True)],
)
def test_a_tree_is_grown_where_it_pays(rate: float, costs: Costs, pays: bool) -> None:
    found = settled(TREE, costs, always(rate))
    fixed = world(TREE, costs, always(rate), adaptive=False).run(MEASURED)
    assert found.rate >= NEARLY * max(fixed.rate, best_rate(costs, rate, TREE.num_steps))
    # A chain of three has at most three nodes; more shows that trees are verified.
    assert (found.verified[0] > 3.5 * MEASURED) == pays


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.85), (0.5, 0.95), (0.85, 0.3)])
def test_drafts_follow_when_acceptance_changes(before: float, after: float) -> None:
    changing = world(CHAIN, BETWEEN, lambda row, step: before if step < 1000 else after)
    changing.run(1000 + SETTLED)
    assert changing.run(MEASURED).rate >= NEARLY * best_rate(BETWEEN, after, CHAIN.num_steps)


def test_drafting_stops_when_drafts_stop_being_accepted() -> None:
    changing = world(CHAIN, BETWEEN, lambda row, step: 0.9 if step < 1000 else 0.02)
    assert changing.run(1000).asked[0] < 20  # the plain step's time is remeasured occasionally
    changing.run(SETTLED)
    assert changing.run(MEASURED).waste <= 0.03


@pytest.mark.parametrize(("rate", "pays"), [(0.02, False), (0.8, True)])
def test_what_is_looked_up_alone_is_verified_where_it_pays(rate: float, pays: bool) -> None:
    free, scores = replace(BETWEEN, level=0), [rate**depth for depth in range(1, 8)]
    alone = World(Policy(CHAIN, adaptive=True), free, always(rate), found=scores, grows=False)
    alone.run(SETTLED)
    found = alone.run(MEASURED)
    assert not found.asked.total() - found.asked[0]
    assert (found.verified[0] > MEASURED) == pays
    assert found.rate >= NEARLY * best_rate(free, rate, CHAIN.num_steps)


class Looking:
    """A policy with look-ups only, which reports whether it asked for one; a plan takes part of a step."""

    def __init__(self) -> None:
        self.policy, self.tracks, self.asked = (
            Policy(CHAIN, adaptive=True, clock=lambda: 0.0),
            [TrackRecord()],
            0,
        )
        for width in (1, 2, 4, 8):
            self.policy.steps.observe(1, width, BETWEEN.verify(width))

    def looks(self, found: Proposal) -> bool:
        before = self.asked

        def look_up() -> Sequence[Proposal]:
            self.asked += 1
            return [found]

        self.policy.plan(StepBatch(1, 1), self.tracks, [ROOM], look_up, grows=False)
        looked = self.asked > before
        (kept,) = self.policy.cut(StepBatch(1, 1), [found if looked else Proposal.bare(0)])
        verify_ms, plan_ms = BETWEEN.verify(len(kept.tree)), 0.1 * BETWEEN.verify(1)
        self.policy.observe_step(1, len(kept.tree), verify_ms, kept.num_drafted, plan_ms if looked else 0.0)
        return looked

    def find_nothing(self, steps: int) -> int:
        return sum(self.looks(Proposal.bare(0)) for _ in range(steps))


GOOD = Proposal.chain(0, [1, 2, 3], [0.9, 0.8, 0.7])


def test_plans_rest_only_while_they_do_not_pay() -> None:
    """Plans that save more than they cost are made for every step; others within their budget."""
    looking = Looking()
    assert all(looking.looks(GOOD if step % 8 == 0 else Proposal.bare(0)) for step in range(200))
    looking.find_nothing(100)
    assert 0 < looking.find_nothing(2000) <= 2000 * LOOKUP_SHARE / 0.1 + 1
    while not looking.looks(GOOD):
        pass
    assert looking.looks(GOOD)  # a draft that pays reactivates the policy


def test_a_new_request_is_planned_for_as_if_plans_had_paid() -> None:
    looking = Looking()
    looking.find_nothing(100)
    assert looking.find_nothing(10) == 0
    looking.tracks = [TrackRecord()]
    looking.policy.on_new_rows(1.0)
    assert looking.looks(Proposal.bare(0)) and looking.looks(Proposal.bare(0))
    assert looking.find_nothing(100) < 20


def test_few_new_rows_among_many_are_not_planned_for() -> None:
    """Planning for them cost a server with three keys a fifth of its throughput; 1/8 of a batch counts."""
    looking = Looking()
    looking.find_nothing(200)

    def change(steps: int) -> int:
        """Replace a row of 64 before each step; return the number of planned steps."""
        planned = 0
        for _ in range(steps):
            looking.policy.on_new_rows(1 / 64)
            planned += looking.looks(Proposal.bare(0))
        return planned

    assert change(7) == 0 and change(1) == 1
    assert 0 < change(5000) <= 0.15 * 5000, "a plan takes a tenth of a step: it lives on a budget"
    waited = 0
    while not change(1):
        waited += 1
    assert waited < 200, "what is not planned for at once is planned for later"


SURE = [0.9**depth for depth in range(1, 8)]


@pytest.mark.parametrize(("rows", "found", "least"), [(1, None, 4.0), (1, SURE, 5.5), (4, SURE, 5.0)])
def test_drafts_that_pay_for_one_short_request_in_five_are_found(
    rows: int, found: list[float] | None, least: float
) -> None:
    own = World(Policy(CHAIN, adaptive=True), SMALL, always(0.0), rows, found=found, grows=found is None)
    own.run(200)
    tokens = 0
    for i in range(100):
        pays = i % 5 == 4
        own.rate = always(0.95 if pays else 0.02)
        own.renew()
        tokens += own.run(60).tokens * pays
    assert tokens > least * rows * 20 * 60


def test_a_text_that_repeats_itself_is_looked_up_at_once_unless_that_misled() -> None:
    looking = Looking()
    looking.find_nothing(100)
    looking.policy.request_plan()
    assert looking.looks(Proposal.bare(0))
    misled = 0
    for _ in range(100):
        looking.policy.request_plan()
        misled += looking.looks(Proposal.bare(0))
    assert misled < 20
    assert RepetitionIndex().repeats([1, 2, 3, 4, 5, 6, 7, 8] * 2, 1000) and not RepetitionIndex().repeats(
        range(100), 1000
    )
    text, echo, seldom = [*range(50), *range(10, 40)], RepetitionIndex(), RepetitionIndex()
    assert [end for end in range(81) if echo.repeats(text[:end], 1000)] == list(range(58, 81))
    assert [end for end in range(0, 81, 9) if seldom.repeats(text[:end], 1000)] == [63, 72]


def test_a_plan_that_drafts_pays_while_no_costs_are_known() -> None:
    policy = Policy(CHAIN, adaptive=True)
    for _ in range(5):
        assert policy.plan(StepBatch(1, 1), [TrackRecord()], [ROOM]) == [CHAIN]
    assert policy.worth.active


SMALL = Costs(step=0.8, token=0.1, level=0.15, plan=0.06)
"""Roughly the shipped model's costs: a plan is a fifteenth of a step, a draft half of one."""
NOISES = {"quiet": jitter, "busy": neighbour}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [0.02, 0.1])
def test_drafts_that_never_pay_cost_next_to_nothing_after_64_tokens(
    noise: str, seed: int, rate: float
) -> None:
    never = World(
        Policy(CHAIN, adaptive=True), SMALL, always(rate), seed=seed, noise=NOISES[noise], found=[0.3, 0.1]
    )
    never.run(64)
    found = never.run(2000)
    typical_ms = found.quiet_ms / found.steps
    assert found.lost_ms <= 0.03 * typical_ms * found.tokens


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_pay_are_found_in_bounded_steps(noise: str, seed: int) -> None:
    """After a long time without gain: a new phase of a text, or of the load."""
    turns = World(
        Policy(CHAIN, adaptive=True),
        SMALL,
        lambda row, step: 0.05 if step < 1000 else 0.95,
        seed=seed,
        noise=NOISES[noise],
    )
    turns.run(1000)
    before = turns.steps
    while turns.steps < before + 3000 and not turns.policy.worth.active:
        turns.run(20)
    found = turns.run(300)
    assert found.tokens > 3 * found.steps
    turns.rate = always(0.05)
    turns.run(64)
    fallen = turns.run(1000)
    assert fallen.lost_ms <= 0.03 * fallen.tokens * fallen.quiet_ms / fallen.steps


@pytest.mark.parametrize(("rate", "drafts"), [(0.9, False), (0.2, True)])
def test_what_a_look_up_finds_is_drafted_anew_only_where_that_is_better(rate: float, drafts: bool) -> None:
    """A head that is right in 0.8 of cases, beside a look-up with accurate scores."""
    scores = [rate**depth for depth in range(1, 8)]
    beside = World(Policy(CHAIN, adaptive=True), BETWEEN, always(0.8 if drafts else rate), found=scores)
    beside.run(SETTLED)
    found = beside.run(MEASURED)
    assert (found.asked[0] < 0.1 * MEASURED) == drafts
    if not drafts:
        free = replace(BETWEEN, level=0)
        assert found.rate >= NEARLY * best_rate(free, rate, CHAIN.num_steps)


def test_a_row_whose_look_up_pays_is_not_probed_beside_another() -> None:
    policy, tracks = Policy(CHAIN, adaptive=True), [TrackRecord(), TrackRecord()]
    for width in (1, 2, 4, 8, 16):
        policy.steps.observe(2, width, BETWEEN.verify(width))
    for shape in policy.shapes:
        policy.observe_draft(shape, 2, BETWEEN.draft(shape))
    found = [Proposal.bare(0), Proposal.chain(0, [1, 2, 3, 4, 5], [0.99, 0.98, 0.97, 0.96, 0.95])]
    for _ in range(50):
        shapes = policy.plan(StepBatch(2, 2), tracks, [ROOM, ROOM], lambda: found)
        assert shapes[1] is None
        drafted = Proposal.chain(0, [7], [0.8]) if shapes[0] else Proposal.bare(0)
        assert len(policy.cut(StepBatch(2, 2), [drafted, found[1]])[1].tree) == 6


def test_a_probe_is_paid_for_and_what_a_head_reads_for_it() -> None:
    policy, tracks = Policy(CHAIN, adaptive=True, clock=lambda: 0.0), [TrackRecord()]
    for width in (1, 2, 4, 8):
        policy.steps.observe(1, width, 50.0)
    policy.observe_draft(CHAIN, 1, 40.0)
    policy.worth.trust, policy.worth.active, policy.probe_budget.debt = 0.0, False, -1.0
    policy._rows = tracks
    assert policy.plan(StepBatch(1, 1), tracks, [ROOM]) == [CHAIN]
    policy.observe_draft(None, 1, 520.0)
    policy.observe_step(1, 1, 50.0, 0, 520.0)
    assert policy.probe_budget.debt == pytest.approx(520 / 50 - 1, rel=0.01)
    assert policy.plan(StepBatch(1, 1), tracks, [ROOM]) == [None]


@pytest.mark.parametrize("rows", [2, 4, 16])
def test_a_batch_drafts_for_every_row_where_width_is_cheap(rows: int) -> None:
    """Measurements of one row must not make a wider step look costlier than it is."""
    found = settled(DraftShape(5, 1, 6), WIDTH_IS_CHEAP, always(0.8), rows)
    assert found.rate >= NEARLY * best_rate(WIDTH_IS_CHEAP, 0.8, 5, drafting=rows, rows=rows)


def test_drafting_stops_as_a_batch_grows_where_width_costs() -> None:
    costs, rate = Costs(step=10, token=1, level=0.5), 0.6
    growing = world(CHAIN, costs, always(rate))
    for rows, pays in ((1, True), (64, False), (1, True)):
        growing.resize(rows)
        growing.run(100)
        found = growing.run(150)
        share = 1 - found.asked[0] / found.asked.total()
        assert share > 0.95 if pays else share < 0.1
        assert found.rate >= (0.9 * best_rate(costs, rate, 7) if pays else 0.97 * rows / costs.verify(rows))


def test_rows_of_good_and_of_bad_drafts_are_told_apart() -> None:
    costs, rows = Costs(step=10, token=1, level=0.2), 4
    mixed = world(CHAIN, costs, lambda row, step: 0.9 if row % 2 else 0.03, rows)
    mixed.run(SETTLED)
    found = mixed.run(MEASURED)
    good, bad = (found.verified[1] + found.verified[3]), (found.verified[0] + found.verified[2])
    assert good > 8 * bad
    assert found.rate >= 0.9 * best_rate(costs, 0.9, 5, drafting=2, rows=rows)


def test_a_row_comes_back_beside_one_that_drafts_all_the_time() -> None:
    """One row's acceptance must not stop the policy from retrying another."""
    costs = Costs(step=10, token=1, level=0.2)
    mixed = world(CHAIN, costs, lambda row, step: 0.9 if row or step >= 600 else 0.03, rows=2)
    assert mixed.run(600).verified[1] > 600
    mixed.run(SETTLED)
    assert mixed.run(MEASURED).verified[0] > MEASURED


shapes = st.builds(
    DraftShape, num_steps=st.integers(1, 9), topk=st.integers(1, 4), num_draft_tokens=st.integers(2, 16)
)


def experienced(rng: Random, shape: DraftShape, rows: int) -> tuple[Policy, list[TrackRecord]]:
    """Return a policy and rows with random measurements."""
    policy = Policy(shape, adaptive=True)
    for _ in range(rng.randrange(12)):
        policy.steps.observe(rng.choice([1, 1, rows]), rng.randint(rows, 64), rng.uniform(0.001, 0.1))
        policy.observe_draft(rng.choice(policy.shapes), rng.randint(1, rows), rng.uniform(0, 0.02))
    track = TrackRecord()
    tracks = [TrackRecord(track) for _ in range(rows)]
    for own in tracks:
        for _ in range(rng.randrange(8)):
            own.observe(rng.choice(policy.shapes), depth := rng.randint(1, 9), rng.randint(0, depth))
    return policy, tracks


@given(shapes, st.lists(st.integers(-1, 12), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_what_is_planned_keeps_to_the_bounds_and_to_the_room(
    bounds: DraftShape, room: Sequence[int], rng: Random
) -> None:
    policy, tracks = experienced(rng, bounds, len(room))
    for _ in range(5):
        for shape, deep in zip(policy.plan(StepBatch(len(room), len(room)), tracks, room), room, strict=True):
            if shape:
                assert shape.num_steps <= min(bounds.num_steps, deep)
                assert shape.topk <= bounds.topk and shape.num_draft_tokens <= bounds.num_draft_tokens


@given(shapes, st.lists(proposals(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_cut_keeps_the_best_part_of_each_proposal(
    bounds: DraftShape, offered: Sequence[Proposal], rng: Random
) -> None:
    policy, _ = experienced(rng, bounds, len(offered))
    kept = policy.cut(StepBatch(len(offered), len(offered)), offered)
    for own, whole in zip(kept, offered, strict=True):
        assert set(paths(own)) <= set(paths(whole))
        assert sorted(own.scores) == sorted(whole.scores)[len(whole.tree) - len(own.tree) :]


@given(shapes, st.lists(proposals(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_what_is_not_adaptive_is_always_the_bounds(
    bounds: DraftShape, offered: Sequence[Proposal], rng: Random
) -> None:
    policy, tracks = experienced(rng, bounds, len(offered))
    policy.adaptive = False
    batch, rows = StepBatch(len(offered), len(offered)), len(offered)
    assert policy.plan(batch, tracks, [bounds.num_steps] * rows) == [bounds] * rows
    assert policy.cut(batch, offered) == list(offered)
    shortened = policy.plan(batch, tracks, [1] * rows)
    assert [shape and shape.num_steps for shape in shortened] == [1] * rows
    assert policy.plan(batch, tracks, [0] * rows) == [None] * rows


def test_a_policy_that_knows_no_costs_drafts() -> None:
    policy, chain = Policy(CHAIN, adaptive=True), Proposal.chain(0, [1, 2], [0.5, 0.4])
    assert policy.plan(StepBatch(1, 1), [TrackRecord()], [9]) == [CHAIN]
    assert policy.cut(StepBatch(1, 1), [chain]) == [chain]


def test_a_slow_hour_is_forgotten() -> None:
    """Steps without drafts were slow once; still assuming so would make any draft look cheap."""
    costs = Costs(step=10, token=2, level=2)
    learning = world(CHAIN, costs, always(0.05))
    learning.costs = Costs(step=60, token=2, level=2)
    learning.run(60)
    learning.costs = costs
    learning.rate = always(0.9)
    learning.run(300)
    learning.rate = always(0.05)
    learning.run(600)
    assert learning.run(MEASURED).rate >= 0.97 * chain_rate(costs, 0.05, 0)
