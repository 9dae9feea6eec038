"""Counter-based noise and logits processing: exact against the specification, and the right distribution."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.native import sampling as native
from specdec.kernels.native.compiled import compiled
from specdec.kernels.sampling import cpu, reference
from specdec.kernels.sampling.rules import Bias, Mask, Penalties, Rules
from tests.tolerances import KERNEL_FLOAT32

BIT64 = st.integers(-(2**63), 2**63 - 1)
RARE = 3.719
"""Normal deviate exceeded by chance once in ten thousand: the bound of every check at fixed seeds."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square_limit(freedom: int) -> float:
    """Return the chi-square value exceeded once in ten thousand (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + RARE * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(count_C: Tensor, share_C: Tensor) -> float:
    expected_C = share_C.double() * count_C.sum()
    return float(((count_C - expected_C) ** 2 / expected_C).sum())


@given(
    st.lists(st.tuples(BIT64, st.integers(0, 2**40)), min_size=1, max_size=3), st.sampled_from([1, 63, 65])
)
@settings(deadline=None, max_examples=30)
def test_words_equal_big_integers(rows: list[tuple[int, int]], vocab: int) -> None:
    seeds, positions = zip(*rows, strict=True)
    actual_NV = cpu.words(cpu.keys(torch.tensor(seeds), torch.tensor(positions)), vocab)
    expected = [[reference.word(s, p, v) for v in range(vocab)] for s, p in rows]
    assert [[h % 2**32 for h in row] for row in actual_NV.tolist()] == expected


@pytest.mark.parametrize("vocab", [1, 63, 65])
def test_gumbel_equals_reference(vocab: int) -> None:
    seed_N, position_N = torch.tensor([0, -1, 2**63 - 1, 7]), torch.tensor([0, 1, 131_071, 7])
    actual_NV = cpu.gumbel(seed_N, position_N, vocab)
    assert actual_NV.dtype == torch.float32
    torch.testing.assert_close(
        actual_NV, reference.gumbel(seed_N, position_N, vocab), rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32
    )


def test_gumbel_is_finite_at_the_ends() -> None:
    ends = cpu._noise(torch.tensor([0, -1, -128, 2**31 - 1, -(2**31)], dtype=torch.int32))
    assert ends.isfinite().all()
    assert ends[0] == pytest.approx(33 * math.log(2))
    assert ends[1] == ends.min() < -2.8


def test_gumbel_of_a_row_ignores_the_batch() -> None:
    """Batches are processed in parts, and vectors end inside a row."""
    vocab = cpu.CACHED // 2 - 3
    seed_N, position_N = torch.arange(5) * 11, torch.arange(5) + 100
    together_NV = cpu.gumbel(seed_N, position_N, vocab)
    for n in range(5):
        alone_NV = cpu.gumbel(seed_N[n : n + 1], position_N[n : n + 1], vocab)
        assert torch.equal(together_NV[n], alone_NV[0])
        assert torch.equal(together_NV[n, :1000], cpu.gumbel(seed_N, position_N, 1000)[n])


def draw_along(axis: str, number: int) -> Tensor:
    """Return noise of neighbouring seeds, positions or tokens, all else equal: [5 others, number]."""
    near, zero = torch.arange(number), torch.zeros(number, dtype=torch.int64)
    if axis == "seed":
        return cpu.gumbel(near, zero + 3, 5).T
    if axis == "position":
        return cpu.gumbel(zero + 3, near, 5).T
    return cpu.gumbel(torch.arange(5), torch.arange(5) + 9, number)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_gumbel_is_uniform_beneath_and_has_its_moments(axis: str) -> None:
    noise_X = draw_along(axis, 100_000).flatten().double()
    uniform_X = -torch.expm1(-torch.exp(-noise_X))
    bins = 1000
    count_C = torch.histc(uniform_X, bins, 0, 1)
    assert chi_square(count_C, torch.full((bins,), 1 / bins)) < chi_square_limit(bins - 1)
    number, variance = len(noise_X), math.pi**2 / 6
    assert abs(float(noise_X.mean()) - 0.5772156649) < RARE * math.sqrt(variance / number)
    # The fourth central moment of the distribution is 5.4 times the variance squared.
    assert abs(float(noise_X.var()) - variance) < RARE * variance * math.sqrt(4.4 / number)


def largest_correlation(noise_AX: Tensor) -> float:
    """Return the largest autocorrelation over some lags, in its own standard deviations."""
    centred_AX = (noise_AX - noise_AX.mean(-1, keepdim=True)) / noise_AX.std(-1, keepdim=True)
    found = [0.0]
    for lag in (1, 2, 3, 4, 16, 64, 1024, 4096):
        product_AX = centred_AX[:, lag:] * centred_AX[:, :-lag]
        found.append(float(product_AX.mean().abs() * math.sqrt(product_AX.numel())))
    return max(found)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_gumbel_of_neighbours_is_uncorrelated(axis: str) -> None:
    assert largest_correlation(draw_along(axis, 20_000).double()) < RARE


def test_a_generator_that_drops_a_bit_of_the_position_is_caught() -> None:
    position_N = torch.arange(20_000) & ~1
    noise_AX = cpu.gumbel(torch.full_like(position_N, 3), position_N, 5).T
    assert largest_correlation(noise_AX.double()) > 10 * RARE


def test_each_random_bit_flips_half_the_time_between_neighbours() -> None:
    near, same = torch.arange(4096), torch.full((4096,), 5)
    by_seed_XA, by_position_XA = cpu.words(cpu.keys(near, same), 5), cpu.words(cpu.keys(same, near), 5)
    by_token_XA = cpu.words(cpu.keys(torch.arange(5), same[:5]), 4096).T
    for word_XA in (by_seed_XA, by_position_XA, by_token_XA):
        flip_XA = word_XA[1:] ^ word_XA[:-1]
        for bit in range(32):
            share = float(((flip_XA >> bit) & 1).double().mean())
            assert abs(share - 0.5) < 4.5 * 0.5 / math.sqrt(flip_XA.numel()), bit


def random_rules(rows: int, vocab: int, seed: int) -> Rules:
    """Return rules in which each row uses some of the features, and some features are unused."""
    g = generator(seed)

    def mixed(values_N: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(rows, generator=g) < 0.5, values_N, off)

    def rand(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=g)

    used = [bool(u) for u in torch.rand(6, generator=g) < 0.6]
    top_k_N = torch.randint(1, vocab + 3, (rows,), generator=g)
    one_N, token_N = torch.ones(rows, dtype=torch.int64), torch.randint(0, vocab, (rows,), generator=g)
    bias = Bias(torch.arange(rows), one_N, token_N.int(), rand(-5, 5))
    row_R = torch.arange(0, rows, 2)
    tokens = [torch.randperm(vocab, generator=g)[: vocab * k // 2] for k in range(len(row_R))]
    token_E = torch.cat(tokens).int()
    penalties = Penalties(
        row_R,
        torch.tensor([len(own_E) for own_E in tokens]),
        token_E,
        torch.randint(0, 3, (len(token_E),), generator=g).float(),
        mixed(rand(0.5, 2), 1)[row_R],
        mixed(rand(-2, 2), 0)[row_R],
        mixed(rand(-2, 2), 0)[row_R],
    )
    words_KW = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=g).int()
    words_KW[:, 0] |= 1  # never empty
    mask = Mask(row_R, torch.randint(0, 2, (len(row_R),), generator=g), words_KW)
    return Rules(
        temperature_N=mixed(mixed(rand(0.2, 2), 1), 0) if seed % 4 else rand(0.2, 2),
        top_k_N=torch.where(torch.rand(rows, generator=g) < 0.5, top_k_N, 0) if used[0] else None,
        top_p_N=mixed(rand(0.05, 0.99), 1) if used[1] else None,
        min_p_N=mixed(rand(0.001, 0.3), 0) if used[2] else None,
        bias=bias if used[3] else None,
        penalties=penalties if used[4] else None,
        mask=mask if used[5] else None,
    )


def _columns_of(whole: Bias | Penalties, n: int) -> tuple[Tensor, ...]:
    """Return one row's columns, renumbered as row 0; empty if it has none."""
    own_E, own_R = whole.at[0] == n, whole.row_R == n
    return (
        torch.zeros_like(whole.row_R[own_R]),
        whole.length_R[own_R],
        *(part[own_E] for part in whole[2:4]),
        *(part[own_R] for part in whole[4:]),
    )


def take_row(rules: Rules, n: int) -> Rules:
    """Return the rules of one row alone."""
    bias = rules.bias and Bias(*_columns_of(rules.bias, n))
    penalties = rules.penalties and Penalties(*_columns_of(rules.penalties, n))
    mask = rules.mask
    if mask is not None:
        own_R = mask.row_R == n
        mask = Mask(torch.tensor([0]), mask.set_R[own_R], mask.words_KW) if own_R.any() else None
    columns = (rules.top_k_N, rules.top_p_N, rules.min_p_N)
    one = [None if column_N is None else column_N[n : n + 1] for column_N in columns]
    return Rules(rules.temperature_N[n : n + 1], *one, bias=bias, penalties=penalties, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 63, 65])
def test_process_equals_reference(vocab: int, dtype: torch.dtype) -> None:
    for seed in range(16):
        # Every other time logits lie on a grid, so that many tie.
        logits_NV = torch.randn(5, vocab, generator=generator(seed)) * 3
        logits_NV = (logits_NV.round() if seed % 2 else logits_NV).to(dtype)
        rules, before_NV = random_rules(5, vocab, seed), logits_NV.clone()
        actual_NV, expected_NV = cpu.process(logits_NV, rules), reference.process(logits_NV, rules)
        assert torch.equal(logits_NV, before_NV)
        assert actual_NV.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(actual_NV.isinf(), expected_NV.isinf())
        torch.testing.assert_close(actual_NV, expected_NV, rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32)


@pytest.mark.skipif(compiled() is None, reason="there is no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 63, 65])
def test_native_process_equals_cpu_to_the_bit(
    vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text must not depend on the kernel that processes its logits."""
    adjusted, called, function = 0, list[str](), native.function
    monkeypatch.setattr(native, "function", lambda name, *rest: called.append(name) or function(name, *rest))
    for seed in range(32):
        logits_NV = (torch.randn(5, vocab, generator=generator(seed)) * 3).to(dtype)
        logits_NV[seed % 5, seed % vocab] = torch.nan
        rules, before_NV = random_rules(5, vocab, seed), logits_NV.clone()
        adjusted += rules.bias is not None or rules.penalties is not None
        actual_NV, expected_NV = native.process(logits_NV, rules), cpu.process(logits_NV, rules)
        assert torch.equal(logits_NV.isnan(), before_NV.isnan())
        assert torch.equal(logits_NV.nan_to_num(), before_NV.nan_to_num())
        assert torch.equal(actual_NV.view(torch.int32), expected_NV.view(torch.int32)), seed
    assert adjusted > 16 and "adjust" in called


def test_process_of_a_row_ignores_the_batch() -> None:
    for seed in range(40):
        logits_NV = torch.randn(6, 700, generator=generator(seed)) * 2
        rules = random_rules(6, 700, seed)
        together_NV = cpu.process(logits_NV, rules)
        for n in range(6):
            alone_NV = cpu.process(logits_NV[n : n + 1], take_row(rules, n))
            assert torch.equal(together_NV[n], alone_NV[0]), (seed, n)


def test_process_leaves_rows_without_rules_unchanged() -> None:
    logits_NV = torch.randn(3, 65, generator=generator(0)) * 10
    everything = Rules(
        temperature_N=torch.tensor([1.0, 0.5, 0.0]),
        top_k_N=torch.tensor([0, 3, 3]),
        top_p_N=torch.tensor([1.0, 0.5, 0.5]),
        min_p_N=torch.tensor([0.0, 0.1, 0.1]),
        bias=Bias(torch.tensor([1]), torch.tensor([1]), torch.tensor([2]).int(), torch.tensor([4.0])),
        penalties=Penalties(
            *(torch.tensor([1]), torch.tensor([65]), torch.arange(65).int(), torch.ones(65)),
            *torch.tensor([[1.5], [0.5], [0.5]]),
        ),
    )
    scores_NV = cpu.process(logits_NV, everything)
    # The last row is greedy: its filters would change nothing and are not applied.
    assert torch.equal(scores_NV[[0, 2]], logits_NV[[0, 2]])
    assert scores_NV[1].isinf().sum() >= 62


def keep(logits: list[float], **rules: Tensor) -> list[int]:
    """Return the ids that processing keeps, on which all kernels must agree."""
    logits_NV, own = torch.tensor([logits], dtype=torch.float32), Rules(torch.ones(1), **rules)
    forms = [cpu.process(logits_NV, own), reference.process(logits_NV, own)]
    if compiled():
        zero_N = torch.zeros(1, dtype=torch.int64)
        forms.append(native._perturb(logits_NV, own, zero_N, zero_N))
    kept = [scores_NV.isfinite()[0].nonzero()[:, 0].tolist() for scores_NV in forms]
    assert all(own == kept[0] for own in kept)
    return kept[0]


@pytest.mark.skipif(compiled() is None, reason="there is no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 63, 65, 700, 5000])
def test_native_filters_equal_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """Kept scores have the same bits as without filters, whatever other rows use."""
    for seed in range(24):
        logits_NV = torch.randn(5, vocab, generator=generator(seed)) * (1 + seed % 3)
        logits_NV = (logits_NV.round() if seed % 2 else logits_NV).to(dtype)
        logits_NV[seed % 5, seed % vocab] = (torch.nan, -torch.inf, torch.inf)[seed % 3]
        rules = replace(random_rules(5, vocab, seed), bias=None, penalties=None, mask=None)
        seed_N, position_N = torch.arange(5) % 2, torch.arange(5) // 2
        found_NV = native._perturb(logits_NV, rules, seed_N, position_N)
        bare_NV = native._perturb(logits_NV, Rules(rules.temperature_N), seed_N, position_N)
        plain_NV = reference.process(logits_NV.double(), rules)
        is_number_N = ~logits_NV.isnan().any(-1) & ~(logits_NV == torch.inf).any(-1)
        assert torch.equal((found_NV == -torch.inf)[is_number_N], (plain_NV == -torch.inf)[is_number_N]), seed
        kept_NV = found_NV > -torch.inf
        assert torch.equal(found_NV[kept_NV], bare_NV[kept_NV])
        token_N = native.sample(logits_NV, rules, seed_N, position_N)
        assert torch.equal(token_N, reference.sample(logits_NV, rules, seed_N, position_N)), seed
        alone = [
            native._perturb(logits_NV[n : n + 1], take_row(rules, n), seed_N[n:], position_N[n:])
            for n in range(5)
        ]
        assert torch.equal(torch.cat(alone).nan_to_num(7.0), found_NV.nan_to_num(7.0))


def test_filters_break_ties_for_the_smaller_id() -> None:
    assert keep([1, 2, 1, 1, 2], top_k_N=torch.tensor([1])) == [1]
    assert keep([1, 2, 1, 1, 2], top_k_N=torch.tensor([3])) == [0, 1, 4]
    assert keep([0, 0, 0, 0], top_p_N=torch.tensor([0.4])) == [0, 1]
    assert keep([0, 0, 0, 0], top_p_N=torch.tensor([0.5])) == [0, 1]
    assert keep([0, 0, 0, 0], top_k_N=torch.tensor([3]), top_p_N=torch.tensor([0.6])) == [0, 1]
    assert keep([-0.0, 0.0, -0.0], top_k_N=torch.tensor([2])) == [0, 1]


def test_filters_keep_the_best_token_at_their_limits() -> None:
    assert keep([3, 1, 2], top_p_N=torch.tensor([1e-30])) == [0]
    assert keep([3, 1, 3], min_p_N=torch.tensor([1.0])) == [0, 2]
    assert keep([3, 1, 2], top_k_N=torch.tensor([99])) == [0, 1, 2]
    assert keep([90, -90], top_k_N=torch.tensor([2]), top_p_N=torch.tensor([1.0])) == [0, 1]


def test_top_p_counts_what_top_k_left() -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1: of the first three, renormalised, two hold 0.77."""
    logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    assert keep(logits, top_p_N=torch.tensor([0.75])) == [0, 1, 2]
    assert keep(logits, top_k_N=torch.tensor([3]), top_p_N=torch.tensor([0.75])) == [0, 1]
    assert keep(logits, min_p_N=torch.tensor([0.6]), top_p_N=torch.tensor([0.5])) == [0]


def test_top_p_finds_nuclei_wider_than_its_first_guess() -> None:
    vocab = 9 * cpu.GUESS
    logits_NV = torch.randn(3, vocab, generator=generator(1)) * torch.tensor([[0.1], [1.0], [5.0]])
    rules = Rules(torch.ones(3), top_p_N=torch.tensor([0.95, 0.8, 0.7]))
    kept_NV = cpu.process(logits_NV, rules).isfinite()
    assert torch.equal(kept_NV, reference.process(logits_NV, rules).isfinite())
    if compiled():
        place_N = torch.zeros(3, dtype=torch.int64)
        assert torch.equal(kept_NV, native._perturb(logits_NV, rules, place_N, place_N).isfinite())
    assert kept_NV[0].sum() > 8 * cpu.GUESS > kept_NV[1].sum() > cpu.GUESS > kept_NV[2].sum()


def test_penalties_follow_their_formulas() -> None:
    penalties = Penalties(
        *(torch.tensor([0]), torch.tensor([3]), torch.arange(3).int(), torch.tensor([0.0, 2.0, 1.0])),
        *torch.tensor([[2.0], [0.5], [0.25]]),
    )
    rules = Rules(torch.tensor([0.0]), penalties=penalties)
    for form in (cpu, reference):
        scores_NV = form.process(torch.tensor([[4.0, 4.0, -4.0, 4.0]]), rules)
        assert scores_NV.tolist() == [[2.0, 2.0 - 1.0, -8.0 - 0.75, 4.0]]


LOGITS = (1.2, 0.3, -0.5, 0.9, -2.0, 0.0, 0.3)
DRAWS = 40_000


def distribution(kept: list[int], temperature: float = 1.0) -> Tensor:
    """Return the probabilities of the kept tokens, by definition."""
    weights = [math.exp(x / temperature) if v in kept else 0.0 for v, x in enumerate(LOGITS)]
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def draw(rules_1: Rules, axis: str) -> Tensor:
    """Count how often each token has the best score plus noise, over many seeds or positions."""
    scores_NV = cpu.process(torch.tensor([LOGITS]), rules_1)
    near, same = torch.arange(DRAWS), torch.full((DRAWS,), 12)
    noise_NV = cpu.gumbel(near, same, 7) if axis == "seed" else cpu.gumbel(same, near, 7)
    return (scores_NV + noise_NV).argmax(-1).bincount(minlength=7)


@pytest.mark.parametrize("axis", ["seed", "position"])
@pytest.mark.parametrize(
    ("temperature", "filters", "kept"),
    [
        (1.0, {}, [0, 1, 2, 3, 4, 5, 6]),
        (0.6, {}, [0, 1, 2, 3, 4, 5, 6]),
        (1.0, {"top_k_N": torch.tensor([3])}, [0, 1, 3]),
        (1.7, {"top_p_N": torch.tensor([0.7])}, [0, 1, 3, 6]),
        (1.0, {"top_k_N": torch.tensor([5]), "top_p_N": torch.tensor([0.8])}, [0, 1, 3, 6]),
        (1.0, {"min_p_N": torch.tensor([0.35])}, [0, 1, 3, 6]),
    ],
)
def test_the_best_of_scores_and_noise_follows_the_distribution(
    temperature: float, filters: dict[str, Tensor], kept: list[int], axis: str
) -> None:
    count_V = draw(Rules(torch.tensor([temperature]), **filters), axis)
    assert sorted(count_V.nonzero()[:, 0].tolist()) == kept
    assert chi_square(count_V[kept], distribution(kept, temperature)[kept]) < chi_square_limit(len(kept) - 1)


def test_the_check_of_the_distribution_has_power() -> None:
    """A temperature of 1.1 instead of 1 shifts the statistic by over 80: it passes in less than 0.1 %."""
    everything = list(range(7))
    wrong_V, right_V = distribution(everything, 1.1), distribution(everything)
    assert DRAWS * float(((wrong_V - right_V) ** 2 / right_V).sum()) > 80
    for axis in ("seed", "position"):
        count_V = draw(Rules(torch.tensor([1.1])), axis)
        assert chi_square(count_V, right_V) > chi_square_limit(6)


@pytest.mark.parametrize("logits", [[0.0, 1.0, 2.0], [float("nan")] * 3, [float("inf"), 1.0, 2.0]])
def test_a_top_p_close_to_zero_keeps_the_best_token(logits: list[float]) -> None:
    """And a NaN row affects no other row."""
    logits_NV = torch.tensor([logits, [3.0, 2.0, 1.0]])
    rules = Rules(temperature_N=torch.ones(2), top_p_N=torch.tensor([1e-46, 1e-46]))
    kept_NV = cpu.process(logits_NV, rules).isfinite()
    assert kept_NV[1].tolist() == [True, False, False]
