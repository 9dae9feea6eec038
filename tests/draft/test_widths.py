"""Rows get the widths that pay: never worse than one width for all, and no group that costs too much."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import mul
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.policy import Policy, StepBatch
from specdec.draft.proposal import DraftShape, Proposal
from specdec.draft.widths import MARGIN, WIDTHS, Curve, WidthCut, best_cut, gains
from tests.draft.naive import proposals

DEPTH = 7
Curves = Callable[[int], Curve]
Sums = Sequence[Sequence[float]]


def straight(rows: int, token: float, group: float = 0.0) -> Curves:
    """Return step times with constant costs per token and per further group of rows, relative to a pass."""
    return lambda groups: lambda nodes: 1 + token * (rows + nodes) + group * (groups - 1)


def chains(seed: int, rows: int) -> list[Proposal]:
    """Draw a head's chains: some texts are easy for it, others not."""
    rng, found = Random(seed), []
    for _ in range(rows):
        sure = rng.betavariate(0.8, 0.8)
        each = [min(max(rng.gauss(sure, 0.15), 0.02), 0.98) for _ in range(DEPTH)]
        found.append(Proposal.chain(0, range(DEPTH), list(accumulate(each, mul))))
    return found


def sums_of(drafted: Sequence[Proposal]) -> list[list[float]]:
    return [gains(own) for own in drafted]


def rate_of(widths: Sequence[int], sums: Sums, curve: Curves) -> float:
    """Return the expected token rate of rows with these widths."""
    tokens = len(sums) + sum(own[min(width, len(own) - 1)] for own, width in zip(sums, widths, strict=True))
    return tokens / curve(len(set(widths)))(sum(widths))


def best_of_any(sums: Sums, curve: Curves) -> float:
    """Return the best rate of rows of any widths: nodes are added one by one, and groups are free."""
    marginal = sorted((more - less for own in sums for less, more in pairwise(own)), reverse=True)
    tokens = accumulate(marginal, initial=float(len(sums)))
    return max(own / curve(1)(nodes) for nodes, own in enumerate(tokens))


@given(
    st.lists(proposals(), min_size=1, max_size=9),
    st.floats(0.001, 0.5),
    st.floats(0, 0.3),
)
def test_what_is_said_of_a_cut_is_what_its_widths_give(
    drafted: Sequence[Proposal], token: float, group: float
) -> None:
    sums, curve = sums_of(drafted), straight(len(drafted), token, group)
    none, one = rate_of([0] * len(sums), sums, curve), best_cut(sums, curve, mixed=False)
    several = best_cut(sums, curve, mixed=True)
    for cut in (one, several):
        assert cut.rate == pytest.approx(rate_of(cut.widths, sums, curve))
        assert cut.seconds == pytest.approx(curve(cut.groups)(cut.nodes))
        assert all(0 <= width <= own.num_drafted for width, own in zip(cut.widths, drafted, strict=True))
        assert cut.rate >= none and (cut.nodes == 0 or cut.rate > MARGIN * none)
    assert several.rate >= one.rate and one.groups <= 2 + len({own.num_drafted for own in drafted})


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
def test_rows_have_three_widths_at_most_beside_none(rows: int) -> None:
    for seed in range(20):
        sums = sums_of(chains(seed, rows))
        for token in (0.5 / rows, 1 / rows, 4 / rows):
            curve = straight(rows, token / 8)
            assert len({*best_cut(sums, curve, mixed=True).widths, 0}) <= 4
            assert len({*best_cut(sums, curve, mixed=False).widths, 0}) <= 2


@pytest.mark.parametrize(("rows", "least"), [(8, 1.01), (64, 1.03)])
def test_widths_by_row_give_more_than_one_width(rows: int, least: float) -> None:
    """On the same scores, with row costs from an eighth of a pass to a whole one; close to the optimum."""
    ratios, nearly = [], []
    for token in (1, 1 / 2, 1 / 4, 1 / 8):
        curve = straight(rows, token / rows)
        for seed in range(16):
            sums = sums_of(chains(seed, rows))
            one, several = (best_cut(sums, curve, mixed=mixed).rate for mixed in (False, True))
            ratios.append(several / one)
            nearly.append(several / best_of_any(sums, curve))
    assert min(ratios) >= 1 and mean(ratios) > least
    assert mean(nearly) > 0.985


def test_where_groups_are_dear_all_rows_have_one_width() -> None:
    for seed in range(10):
        sums = sums_of(chains(seed, 16))
        free, dear = (best_cut(sums, straight(16, 1 / 64, group), mixed=True) for group in (0.0, 1.0))
        assert free.groups > 2 and dear.groups == 1 and dear.nodes


def test_a_step_of_the_costs_is_not_crossed_for_little() -> None:
    """If a ninth token costs as much as a pass, eight tokens are not exceeded."""
    sums = sums_of(chains(3, 4))
    cut = best_cut(sums, lambda groups: lambda nodes: 1.0 if nodes <= 4 else 9.0, mixed=True)
    assert 0 < cut.nodes <= 4


def test_nothing_drafted_is_nothing_verified() -> None:
    cut = best_cut([[0.0]] * 3, straight(3, 0.1), mixed=True)
    assert cut == WidthCut((0, 0, 0), pytest.approx(3 / 1.3), pytest.approx(1.3))


def planned(rows: int, token: float, *, mixed: bool = True, group: float = 0.0) -> Policy:
    """Return a policy with measured times for these rows and several widths."""
    policy = Policy(DraftShape(DEPTH, 1, DEPTH + 1), adaptive=True, mixed=mixed)
    for groups in range(1, 5):
        for tokens in (rows, 2 * rows, 4 * rows, 8 * rows):
            policy.steps.observe(rows, tokens, straight(0, token, group)(groups)(tokens), groups)
    return policy


def kept_rate(policy: Policy, drafted: Sequence[Proposal], token: float) -> float:
    kept = policy.cut(StepBatch(len(drafted), len(drafted)), drafted)
    return rate_of([own.num_drafted for own in kept], sums_of(drafted), straight(len(drafted), token))


def test_a_batch_is_cut_to_widths_by_row() -> None:
    rows, token = 16, 1 / 32
    for seed in range(10):
        drafted = chains(seed, rows)
        several, one = (
            kept_rate(planned(rows, token, mixed=mixed), drafted, token) for mixed in (True, False)
        )
        assert several > one
        kept = planned(rows, token).cut(StepBatch(rows, rows), drafted)
        assert len({len(own.tree) for own in kept}) > 2
        for own, whole in zip(kept, drafted, strict=True):
            assert own == whole.best(len(own.tree))
        # Better drafts are cut no shorter, unlike with another row's width.
        best, worst = (
            max(drafted, key=lambda own: min(own.scores)),
            min(drafted, key=lambda own: own.scores[1]),
        )
        assert len(kept[drafted.index(best)].tree) > len(kept[drafted.index(worst)].tree)


def test_a_row_that_got_another_rows_width_gives_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: rotated widths keep their number and cost, but not their gain."""
    rows, token = 16, 1 / 32

    def wrong(sums: Sums, curve: Curves, *, mixed: bool) -> WidthCut:
        cut = best_cut(sums, curve, mixed=mixed)
        return WidthCut((*cut.widths[1:], cut.widths[0]), cut.rate, cut.seconds)

    right = [kept_rate(planned(rows, token), chains(seed, rows), token) for seed in range(5)]
    monkeypatch.setattr("specdec.draft.policy.best_cut", wrong)
    moved = [kept_rate(planned(rows, token), chains(seed, rows), token) for seed in range(5)]
    assert all(bad < good for bad, good in zip(moved, right, strict=True))


def test_what_groups_cost_is_learnt_from_steps() -> None:
    rows, token = 16, 1 / 32
    drafted = chains(1, rows)
    policy = planned(rows, token)
    assert len({own.num_drafted for own in policy.cut(StepBatch(rows, rows), drafted)}) > 2
    for groups in (2, 3, 4):
        for tokens in range(20, 60, 3):
            for _ in range(40):
                seconds = straight(0, token, 1.0)(groups)(tokens)
                policy.observe_step(rows, tokens, seconds, groups=groups)
    assert len({own.num_drafted for own in policy.cut(StepBatch(rows, rows), drafted)}) == 1


def test_widths_that_are_tried_have_neighbours_that_differ_by_a_factor() -> None:
    assert all(1 < high / low <= 2 for low, high in pairwise(WIDTHS[1:]))


@pytest.mark.parametrize(
    ("known", "gain", "least"),
    [([(8, 8)], 1.1, 1.0), ([(8, 8), (8, 64)], 1.01, 0.95)],
    ids=["beyond what was measured", "between two that were"],
)
def test_experts_that_tokens_meet_are_reckoned_with(
    known: Sequence[tuple[int, int]], gain: float, least: float
) -> None:
    """Each token loads 8 of 128 experts, most of a step's time: one row is measured at all widths, 8 at few.

    A straight line overestimates further tokens, or underestimates a few, and then drafts lose.
    """

    def met(tokens: int) -> float:
        return 16 * (1 - (15 / 16) ** tokens)

    def time(tokens: int) -> float:
        return 1.0 + 0.05 * tokens + 0.95 * met(tokens)

    rates: dict[str, list[float]] = {"straight": [], "bent": []}
    for seed in range(20):
        drafted = chains(seed, 8)
        for name, work in (("straight", float), ("bent", lambda n: 0.05 * n + 0.95 * met(n))):
            policy = Policy(DraftShape(DEPTH, 1, DEPTH + 1), adaptive=True, work=work)
            for rows, tokens in (*((1, n) for n in (1, 2, 3, 4, 6, 8)), *known):
                policy.steps.observe(rows, tokens, time(tokens))
            widths = [own.num_drafted for own in policy.cut(StepBatch(8, 8), drafted)]
            true = rate_of(widths, sums_of(drafted), lambda groups: lambda nodes: time(8 + nodes))
            rates[name].append(true / (8 / time(8)))
    assert min(rates["bent"]) >= 1.0
    assert mean(rates["bent"]) > gain * mean(rates["straight"])
    assert min(rates["straight"]) < least or least == 1.0
