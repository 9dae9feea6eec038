"""Sampling and ranking tokens: every kernel against the specification, with ties, filters and NaN."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
import triton as compiler
import triton.language as tl
from torch import Tensor

from specdec.kernels.sampling import cpu, reference, triton
from specdec.kernels.sampling.rules import Bias, Penalties, Rules

SEEDS = torch.tensor([0, -1, 2**63 - 1, -(2**63), 7, 123456789012345678])
POSITIONS = torch.tensor([0, 1, 131_071, 2**40, 7, 5])
NOISE = 2e-6
"""Error of noise against its formula of w in float32, relative or absolute: logarithms are rounded."""
SHARE = 1e-5
# NumPy, which runs the kernels here, warns where a GPU is silent.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
forms = pytest.mark.parametrize("ops", [cpu, triton], ids=["cpu", "triton"])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(vocab: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw logits; every other time they lie on a grid, so that many tie."""
    logits_NV = torch.randn(6, vocab, generator=generator(seed)) * 3
    return (logits_NV.round() if seed % 2 else logits_NV).to(dtype)


def draw_rules(vocab: int, seed: int) -> Rules:
    """Draw rules with or without each filter, in rows of every temperature."""
    g = generator(seed + 1000)

    def column(low: float, high: float, off: float) -> Tensor | None:
        values_N = low + (high - low) * torch.rand(6, generator=g)
        values_N = torch.where(torch.rand(6, generator=g) < 0.6, values_N, off)
        return values_N if torch.rand((), generator=g) < 0.7 else None

    top_k_N = column(1, 2 * vocab**0.5, 0)
    temperature_N = 0.2 + torch.rand(6, generator=g)
    return Rules(
        temperature_N=torch.where(torch.rand(6, generator=g) < 0.3, 0.0, temperature_N),
        top_k_N=None if top_k_N is None else top_k_N.long(),
        top_p_N=column(0.05, 0.99, 1),
        min_p_N=column(0.001, 0.3, 0),
    )


def sampled(**filters: Tensor) -> Rules:
    return Rules(torch.ones(6), **filters)


def assert_is_noise_of(noise_X: Tensor, word_X: Tensor) -> None:
    w_X = ((word_X.view(torch.uint32).float() + 0.5) * 2.0**-32).clamp(max=reference.LARGEST)
    expected_X = -(-torch.log1p(-w_X.double())).log()
    torch.testing.assert_close(noise_X.double(), expected_X, rtol=NOISE, atol=NOISE)


@compiler.jit
def _show(seed, position, word, noise, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    h = triton._word(tl.load(seed + row), tl.load(position + row), at)
    tl.store(word + row * vocab + at, h.to(tl.int32, bitcast=True), mask=at < vocab)
    tl.store(noise + row * vocab + at, triton._noise(h), mask=at < vocab)


def test_random_bits_equal_the_specification_and_noise_is_close() -> None:
    word_NV, noise_NV = torch.zeros(6, 1000, dtype=torch.int32), torch.full((6, 1000), torch.nan)
    _show[(6,)](SEEDS, POSITIONS, word_NV, noise_NV, 1000, BLOCK=1024)
    rows = zip(SEEDS.tolist(), POSITIONS.tolist(), strict=True)
    assert [[h % 2**32 for h in row] for row in word_NV.tolist()] == [
        [reference.word(seed, position, token) for token in range(1000)] for seed, position in rows
    ]
    assert_is_noise_of(noise_NV, word_NV)


@compiler.jit
def _noise_of(word, noise, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(noise + at, triton._noise(tl.load(word + at).to(tl.uint32, bitcast=True)))


def test_noise_keeps_its_digits_at_both_ends() -> None:
    words = [*range(8), *(2**k for k in range(3, 32)), *(2**32 - 2**k for k in range(27))]
    word_X = torch.tensor([h - 2**32 if h >= 2**31 else h for h in words], dtype=torch.int32)
    noise_X = torch.full((64,), torch.nan)
    _noise_of[(1,)](word_X, noise_X, BLOCK=64)
    assert_is_noise_of(noise_X, word_X)
    assert noise_X.max() > 22 and noise_X.min() < -2.8
    # Where noise is large, w is exact, and the noise equals the specification's.
    expected_X = torch.tensor([reference._noise(h) for h in words])
    large_X = expected_X > 0
    torch.testing.assert_close(noise_X[large_X], expected_X[large_X], rtol=NOISE, atol=NOISE)


@forms
@pytest.mark.parametrize("vocab", [1, 2, 63, 65])
def test_pick_and_best_equal_reference(ops: ModuleType, vocab: int) -> None:
    for seed in range(30 if ops is cpu else 4):
        logits_NV, rules = draw(vocab, seed), draw_rules(vocab, seed)
        before_NV = logits_NV.clone()
        expected_N = reference.sample(logits_NV, rules, SEEDS, POSITIONS)
        assert ops.sample(logits_NV, rules, SEEDS, POSITIONS).tolist() == expected_N.tolist()
        for count in (1, 4):
            token_NC, share_NC = ops.topk_with_noise(logits_NV, rules, SEEDS, POSITIONS, count)
            wanted_NC, own_NC = reference.topk_with_noise(logits_NV, rules, SEEDS, POSITIONS, count)
            assert token_NC.tolist() == wanted_NC.tolist()
            torch.testing.assert_close(share_NC, own_NC, rtol=SHARE, atol=SHARE)
        assert torch.equal(logits_NV, before_NV)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [triton.PART - 1, triton.PART + 1])
def test_parts_of_a_vocabulary_make_one_row(vocab: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        wide_NV, rules = draw(vocab + 3, seed, dtype), draw_rules(vocab, seed)
        logits_NV = wide_NV[:, 1 : vocab + 1]
        expected_N = cpu.sample(logits_NV, rules, SEEDS, POSITIONS)
        assert triton.sample(logits_NV, rules, SEEDS, POSITIONS).tolist() == expected_N.tolist()
        token_NC, share_NC = triton.topk_with_noise(logits_NV, rules, SEEDS, POSITIONS, 4)
        wanted_NC, own_NC = cpu.topk_with_noise(logits_NV, rules, SEEDS, POSITIONS, 4)
        assert token_NC.tolist() == wanted_NC.tolist()
        torch.testing.assert_close(share_NC, own_NC.float(), rtol=SHARE, atol=SHARE)


def kept(logits_NV: Tensor, rules: Rules) -> list[list[int]]:
    """Return the tokens that each row's filter limits keep."""
    least_N1, last_N1 = (limit_N[:, None] for limit_N in triton._limits(logits_NV, rules))
    scores_NV = logits_NV / torch.where(rules.temperature_N > 0, rules.temperature_N, 1)[:, None]
    equals_NV = (scores_NV == least_N1) & (torch.arange(logits_NV.shape[1]) <= last_N1)
    left_NV = ((scores_NV > least_N1) | equals_NV) & scores_NV.isfinite()
    return [row_V.nonzero()[:, 0].tolist() for row_V in left_NV]


def test_filters_equal_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(40):
        monkeypatch.setattr(triton, "ROW", 32 if seed % 4 else 128)
        logits_NV, rules = draw(65, seed) / 3, draw_rules(65, seed)
        if rules.top_k_N is rules.top_p_N is rules.min_p_N is None:
            continue
        finite_NV = reference.process(logits_NV, rules).isfinite()
        assert kept(logits_NV, rules) == [row_V.nonzero()[:, 0].tolist() for row_V in finite_NV], seed


@pytest.mark.parametrize(
    ("logits", "filters", "ids"),
    [
        ([1, 2, 1, 1, 2], {"top_k_N": 1}, {1}),
        ([1, 2, 1, 1, 2], {"top_k_N": 3}, {0, 1, 4}),
        ([0, 0, 0, 0], {"top_p_N": 0.4}, {0, 1}),
        ([0, 0, 0, 0], {"top_p_N": 0.5}, {0, 1}),
        ([0, 0, 0, 0], {"top_k_N": 3, "top_p_N": 0.6}, {0, 1}),
        ([0, 0, 1, 0, 0], {"top_k_N": 4, "top_p_N": 0.99}, {0, 1, 2, 3}),
        ([-0.0, 0.0, -0.0], {"top_k_N": 2}, {0, 1}),
        ([3, 1, 2], {"top_p_N": 1e-30}, {0}),
        ([3, 1, 2], {"top_p_N": 1e-46}, {0}),
        ([3, 1, 3], {"min_p_N": 1.0}, {0, 2}),
        ([3, 1, 2], {"top_k_N": 99}, {0, 1, 2}),
        ([9, -9], {"top_k_N": 2, "top_p_N": 1.0}, {0, 1}),
        ([2, 1.9, 0, -1], {"min_p_N": 0.5, "top_k_N": 3}, {0, 1}),
        ([2, 1.9, 1.8, -1], {"min_p_N": 0.5, "top_k_N": 2}, {0, 1}),
        ([-torch.inf, 1, -torch.inf, 0], {"top_k_N": 3}, {1, 3}),
        ([-torch.inf, 1, -torch.inf, 0], {"top_p_N": 0.999}, {1, 3}),
        ([3e38, -3e38, 3e38, 0], {"top_k_N": 1}, {0}),
    ],
)
def test_filters_break_ties_and_keep_the_best_at_their_limits(
    logits: list[float], filters: dict[str, float], ids: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "ROW", 2)
    rules = sampled(**{name: torch.full((6,), value) for name, value in filters.items()})
    assert kept(torch.tensor([logits] * 6).float(), rules) == [sorted(ids)] * 6


@forms
def test_of_equals_the_smallest_id_is_first(ops: ModuleType) -> None:
    """In one part, in several, and where all are minus infinity."""
    cold = Rules(torch.zeros(6))
    logits_NV = torch.zeros(6, triton.PART + 9)
    logits_NV[0, [5, triton.PART, triton.PART + 3]] = 1.0
    logits_NV[1] = -torch.inf
    logits_NV[2] = -0.0
    logits_NV[2, 1::2] = 0.0
    logits_NV[3, -2:] = torch.inf
    last = triton.PART + 7
    expected = [[5, triton.PART, triton.PART + 3, 0], *[[0, 1, 2, 3]] * 2, [last, last + 1, 0, 1]]
    token_NC, share_NC = ops.topk_with_noise(logits_NV, cold, SEEDS, POSITIONS, 4)
    assert token_NC.tolist() == [*expected, *[[0, 1, 2, 3]] * 2]
    assert ops.sample(logits_NV, cold, SEEDS, POSITIONS).tolist() == [row[0] for row in token_NC.tolist()]
    assert share_NC[[1, 3]].tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("ops", [reference, cpu, triton], ids=["reference", "cpu", "triton"])
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k_N": 2}, {"top_p_N": 0.5}, {"min_p_N": 0.5}, {"top_k_N": 3, "top_p_N": 0.4, "min_p_N": 0.1}],
    ids=str,
)
def test_a_row_with_nan_is_reported(ops: ModuleType, filters: dict[str, float]) -> None:
    """Filters must not hide NaN, and other rows are unaffected."""
    columns = {name: torch.full((6,), value) for name, value in filters.items()}
    rules = replace(sampled(**columns), temperature_N=torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0]))
    logits_NV = draw(70, 4)
    expected_N = reference.sample(logits_NV, rules, SEEDS, POSITIONS)
    logits_NV[0], logits_NV[1, 69], logits_NV[2], logits_NV[3, 5] = torch.nan, torch.nan, torch.nan, torch.nan
    assert ops.sample(logits_NV, rules, SEEDS, POSITIONS).tolist() == [-1] * 4 + expected_N[4:].tolist()
    token_NC, share_NC = ops.topk_with_noise(logits_NV, rules, SEEDS, POSITIONS, 3)
    assert share_NC[:4].tolist() == [[0.0] * 3] * 4 and (share_NC[4:, 0] > 0).all()
    assert token_NC[[0, 2]].tolist() == [[0, 1, 2]] * 2 and token_NC[[1, 3], 0].tolist() == [69, 5]
    assert all(len(set(row)) == 3 for row in token_NC.tolist())


def test_unsupported_operations_go_to_plain_torch() -> None:
    logits_NV = draw(65, 2)
    bias = Bias(torch.tensor([1]), torch.tensor([1]), torch.tensor([3]).int(), torch.tensor([9.0]))
    penalties = Penalties(
        *(torch.tensor([0]), torch.tensor([65]), torch.arange(65).int(), torch.ones(65)),
        *torch.tensor([[0.5], [0.5], [0.5]]),
    )
    rules = draw_rules(65, 2)
    for own, x_NV in (
        (replace(rules, bias=bias), logits_NV),
        (replace(rules, penalties=penalties), logits_NV),
        (rules, logits_NV.double()),
    ):
        assert torch.equal(
            triton.sample(x_NV, own, SEEDS, POSITIONS), cpu.sample(x_NV, own, SEEDS, POSITIONS)
        )
        for found, wanted in zip(
            triton.topk_with_noise(x_NV, own, SEEDS, POSITIONS, 3),
            cpu.topk_with_noise(x_NV, own, SEEDS, POSITIONS, 3),
            strict=True,
        ):
            assert torch.equal(found, wanted)


@forms
def test_seed_and_position_change_the_token(ops: ModuleType) -> None:
    """Validates the comparisons: the noise decides the token."""
    flat_NV, rules = torch.zeros(6, 65), sampled()
    tokens = [
        tuple(ops.sample(flat_NV, rules, SEEDS + i, POSITIONS + j).tolist())
        for i, j in ((0, 0), (1, 0), (0, 1))
    ]
    assert all(len(set(row)) > 1 for row in zip(*tokens, strict=True))
