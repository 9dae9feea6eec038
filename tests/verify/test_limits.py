"""What a node may choose from, as words of bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import SamplingParams
from specdec.kernels.sampling.cpu import unpack
from specdec.kernels.table import load_kernels
from specdec.verify.choose import Chooser, Node, choose
from specdec.verify.limits import Limit, NotYet, bounded_words


def allowed(words_W: torch.Tensor | None, vocab: int) -> set[int]:
    if words_W is None:
        return set(range(vocab))
    kept: list[int] = unpack(words_W[None], vocab)[0].nonzero()[:, 0].tolist()
    return set(kept)


@given(st.integers(1, 100), st.data())
def test_words_hold_all_tokens_but_the_ends(vocab: int, data: st.DataObject) -> None:
    ends = data.draw(st.sets(st.integers(0, vocab - 1)))
    assert allowed(NotYet(ends, 1, vocab).words(()), vocab) == set(range(vocab)) - ends


def test_an_end_is_forbidden_until_output_and_path_are_long_enough() -> None:
    limit = NotYet({3}, 3, 40)
    assert [3 in allowed(limit.words([0] * drafted), 40) for drafted in range(5)] == [0, 0, 0, 1, 1]
    assert limit.observe(7) and limit.observe(8)
    assert [3 in allowed(limit.words([0] * drafted), 40) for drafted in range(3)] == [0, 1, 1]
    assert not limit.observe(9), "from here on nothing is bounded"


class Only:
    """Allows some tokens."""

    is_over = False

    def __init__(self, *tokens: int) -> None:
        self.inner = NotYet(set(range(64)) - set(tokens), 9, 64)

    def words(self, path: object) -> torch.Tensor | None:
        return self.inner.words(())

    def observe(self, token: int) -> bool:
        return True


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([Only(1, 2, 40), Only(2, 40, 63)], {2, 40}),
        ([Only(1, 2), Only(3)], {1, 2}),
        ([NotYet({5}, 1, 64), Only(5, 6)], {6}),
        ([Only(5), NotYet({5}, 1, 64)], {5}),
    ],
)
def test_a_limit_that_would_leave_nothing_yields_to_those_before(
    limits: list[Limit], expected: set[int]
) -> None:
    assert allowed(bounded_words(limits, ()), 64) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kernels", ["cpu", "native"])
def test_a_bounded_node_chooses_beside_free_ones(temperature: float, kernels: str) -> None:
    """Of eight rows two are bounded; the other choices are what they were."""
    logits_NV = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=temperature)
    free = [Chooser(params, seed=n, prompt=[1], vocab=64) for n in range(8)]
    some = [Chooser(params, seed=n, prompt=[1], vocab=64, limits=[Only(7, 33)]) for n in (2, 5)]
    mixed = [*free[:2], some[0], *free[3:5], some[1], *free[6:]]
    before, after = (
        [c.token for c in choose(logits_NV, [Node(own, 9) for own in each], load_kernels(kernels))]
        for each in (free, mixed)
    )
    assert [n for n in range(8) if before[n] != after[n]] == [2, 5]
    assert {after[2], after[5]} <= {7, 33}
    assert not some[0].is_blind and not some[0].is_static and free[0].is_blind
