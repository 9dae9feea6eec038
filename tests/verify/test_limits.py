"""Bitmasks of a node's allowed tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import SamplingParams
from specdec.core.params import ValidatedParams
from specdec.kernels.sampling.cpu import unpack
from specdec.kernels.table import load_kernels
from specdec.verify.limits import AllowedTokens, BadWords, MinTokens, TokenLimit, bounded_words
from specdec.verify.sampler import SamplingNode, TokenSampler, choose


def allowed(words_W: torch.Tensor | None, vocab: int) -> set[int]:
    if words_W is None:
        return set(range(vocab))
    kept: list[int] = unpack(words_W[None], vocab)[0].nonzero()[:, 0].tolist()
    return set(kept)


@given(st.integers(1, 100), st.data())
def test_min_tokens_allows_all_but_the_end_tokens(vocab: int, data: st.DataObject) -> None:
    ends = data.draw(st.sets(st.integers(0, vocab - 1)))
    assert allowed(MinTokens(ends, 1, vocab).words(()), vocab) == set(range(vocab)) - ends


def test_an_end_is_forbidden_until_output_and_path_are_long_enough() -> None:
    limit = MinTokens({3}, 3, 40)
    assert [3 in allowed(limit.words((0,) * drafted), 40) for drafted in range(5)] == [0, 0, 0, 1, 1]
    assert limit.observe(7) and limit.observe(8)
    assert [3 in allowed(limit.words((0,) * drafted), 40) for drafted in range(3)] == [0, 1, 1]
    assert not limit.observe(9), "from here on nothing is bounded"


def Only(*tokens: int) -> AllowedTokens:
    return AllowedTokens(tokens, 64)


TOKENS = st.integers(0, 3)


@given(
    st.sets(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6),
    st.lists(TOKENS, max_size=8),
    st.lists(TOKENS, max_size=5),
)
def test_a_sequence_is_never_completed_by_output_and_path(
    sequences: set[tuple[int, ...]], said: list[int], path: list[int]
) -> None:
    limit = BadWords(sequences, 40)
    for token in said:
        limit.observe(token)
    whole = (*said, *path)
    ended = {
        token
        for token in range(40)
        if any((*whole, token)[-len(sequence) :] == sequence for sequence in sequences)
    }
    assert allowed(limit.words(tuple(path)), 40) == set(range(40)) - ended
    completed = any(
        tuple(said[: i + 1])[-len(sequence) :] == sequence for i in range(len(said)) for sequence in sequences
    )
    assert bool(limit.fault) == completed


def test_a_long_bad_word_is_looked_up_at_its_length_only() -> None:
    """Whatever the output repeats, each position tries only the lengths that occur."""
    looked_up = 0

    class Counted(dict[tuple[int, ...], frozenset[int]]):
        def get(self, *key: Any) -> Any:
            nonlocal looked_up
            looked_up += 1
            return super().get(*key)

    limit = BadWords({(*[1] * 120, 2), (1, 1, 3), (5,)}, 40)
    limit._lasts = Counted(limit._lasts)
    for _ in range(200):
        limit.observe(1)
    assert allowed(limit.words((1,)), 40) == set(range(40)) - {2, 3, 5}
    assert looked_up <= 2 * 201
    looked_up = 0
    assert allowed(limit.words((7,)), 40) == set(range(40)) - {5} and not looked_up


def test_an_early_end_is_an_error_unless_the_grammar_ends() -> None:
    for yields in (False, True):
        limit = MinTokens({5}, 3, 64, yields=yields)
        assert limit.observe(1) and limit.observe(5)
        assert bool(limit.fault) != yields


def test_choices_have_separate_limits_over_shared_words() -> None:
    terms = ValidatedParams(
        SamplingParams(), limits=(AllowedTokens([1, 2], 64), BadWords([(1, 2)], 64), MinTokens({2}, 3, 64))
    )
    first, second = terms.begin_limits(), terms.begin_limits()
    for limit in first:
        limit.observe(1)
        limit.observe(7)
    assert first[0].fault and not second[0].fault and not terms.limits[0].fault
    for path in ((), (1,), (1, 1, 1)):
        fresh = [own.words(path) for own in terms.begin_limits()]
        for own, other in zip((limit.words(path) for limit in second), fresh, strict=True):
            assert allowed(own, 64) == allowed(other, 64)
    for own, other in zip(first, second, strict=True):
        assert own._bits is other._bits  # type: ignore[attr-defined]


@given(st.integers(1, 100), st.data())
def test_only_allowed_tokens_may_be_chosen(vocab: int, data: st.DataObject) -> None:
    tokens = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1))
    limit = AllowedTokens(tokens, vocab)
    assert allowed(limit.words((0,)), vocab) == tokens
    for token in tokens:
        assert limit.observe(token) and not limit.fault
    assert limit.observe(vocab) and limit.fault


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([Only(1, 2, 40), Only(2, 40, 63)], {2, 40}),
        ([Only(1, 2), Only(3)], {1, 2}),
        ([MinTokens({5}, 1, 64), Only(5, 6)], {6}),
        ([Only(5), MinTokens({5}, 1, 64)], {5}),
    ],
)
def test_a_limit_that_would_ban_all_tokens_yields_to_earlier_ones(
    limits: list[TokenLimit], expected: set[int]
) -> None:
    assert allowed(bounded_words(limits, ()), 64) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kernels", ["cpu", "native"])
def test_constrained_and_free_nodes_choose_in_one_batch(temperature: float, kernels: str) -> None:
    """Two of eight rows are bounded; the other choices are unchanged."""
    logits_NV = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=temperature)
    free = [TokenSampler(params, seed=n, prompt=[1], vocab=64) for n in range(8)]
    some = [TokenSampler(params, seed=n, prompt=[1], vocab=64, limits=[Only(7, 33)]) for n in (2, 5)]
    mixed = [*free[:2], some[0], *free[3:5], some[1], *free[6:]]
    before, after = (
        [c.token for c in choose(logits_NV, [SamplingNode(own, 9) for own in each], load_kernels(kernels))]
        for each in (free, mixed)
    )
    assert [n for n in range(8) if before[n] != after[n]] == [2, 5]
    assert {after[2], after[5]} <= {7, 33}
    assert not some[0].ignores_history and not some[0].runs_on_device and free[0].ignores_history
