"""C kernels of matrix products, noise and ranking against the torch kernels and the specification."""

import math

import pytest
import torch
from torch import Tensor

from specdec.kernels.linear import cpu as linear_cpu
from specdec.kernels.linear import reference as linear_reference
from specdec.kernels.linear.integers import INT4, INT8
from specdec.kernels.native import compiled, linear, sampling
from specdec.kernels.native.instruction_sets import c_kernels
from specdec.kernels.sampling import cpu, reference
from specdec.kernels.sampling.rules import NO_TOKEN, Rules
from tests.kernels.sums import by_matrix_units, by_pairs
from tests.tolerances import KERNEL

pytestmark = pytest.mark.skipif(compiled.compiled() is None, reason="there is no C compiler")

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def tiled() -> bool:
    """Return whether matrix units multiply bfloat16 here."""
    found = c_kernels()
    return found is not None and found.tiles


def _weights(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(outputs * inputs)
    return torch.randn(outputs, inputs, generator=generator).to(dtype)


@TYPES
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 63])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (15, 4), (33, 6), (65, 64), (130, 192)])
@pytest.mark.parametrize("biased", [False, True])
def test_product_is_the_references(
    tokens: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype
) -> None:
    weight_ND, x_TD = _weights(outputs, inputs, dtype), _weights(tokens, inputs, dtype)
    bias_N = _weights(outputs, 1, dtype)[:, 0] if biased else None
    packed = linear.pack(weight_ND, bias_N)
    assert isinstance(packed, linear.Panels)
    found = linear.linear(x_TD, packed)
    wanted = linear_reference.linear(x_TD, linear_reference.pack(weight_ND, bias_N))
    limit = KERNEL[dtype]
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit)


@TYPES
def test_a_rows_product_does_not_depend_on_its_window(dtype: torch.dtype) -> None:
    packed, x_TD = linear.pack(_weights(200, 96, dtype)), _weights(129, 96, dtype)
    whole = torch.cat([linear.linear(row, packed) for row in x_TD.split(1)])
    for width in (2, 3, 4, 5, 6, 7, 15, 16, 17, 33, 64, 129):
        parts = [linear.linear(part, packed) for part in x_TD.split(width)]
        assert torch.equal(torch.cat(parts), whole)


@TYPES
def test_no_rows_have_no_product(dtype: torch.dtype) -> None:
    """Configuring a tile without rows would kill the process."""
    packed = linear.pack(_weights(65, 64, dtype))
    assert linear.linear(torch.empty(0, 64, dtype=dtype), packed).shape == (0, 65)


@pytest.mark.parametrize("inputs", [48, 320])
@pytest.mark.parametrize("tokens", [1, 3, 6, 16, 31, 50])
def test_products_in_bfloat16_have_the_same_bits_on_every_processor(tokens: int, inputs: int) -> None:
    """Only matrix units have a different summation order."""
    weight_ND, x_TD = _weights(70, inputs), _weights(tokens, inputs)
    found = linear.linear(x_TD, linear.pack(weight_ND))
    wanted = by_matrix_units if tiled() else by_pairs
    assert torch.equal(found, wanted(x_TD, weight_ND).bfloat16())


@TYPES
def test_threads_share_a_product_and_change_no_bit(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    packed, x_TD = linear.pack(_weights(8192, 512, dtype)), _weights(32, 512, dtype)
    alone = linear.linear(x_TD, packed)
    request.getfixturevalue("three_threads")
    assert all(torch.equal(linear.linear(x_TD, packed), alone) for _ in range(5))


@TYPES
def test_no_rows_have_no_products(dtype: torch.dtype) -> None:
    """Matrix units refuse tiles without rows."""
    weight_ND = _weights(33, 64, dtype)
    for matrix in (weight_ND, INT8.quantise(weight_ND), INT4.quantise(weight_ND)):
        assert linear.linear(_weights(0, 64, dtype), linear.pack(matrix)).shape == (0, 33)


@TYPES
def test_strided_rows_are_read_in_place(dtype: torch.dtype) -> None:
    packed, wide_TD = linear.pack(_weights(33, 32, dtype)), _weights(9, 80, dtype)
    view_TD = wide_TD[:, 16:48]
    assert torch.equal(linear.linear(view_TD, packed), linear.linear(view_TD.contiguous(), packed))
    turned = _weights(32, 9, dtype).t()
    assert torch.equal(linear.linear(turned, packed), linear.linear(turned.contiguous(), packed))


@TYPES
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    packed, x_TD = linear.pack(_weights(20, 16, dtype)), _weights(3, 16, dtype)
    x_TD[1, 3] = math.nan
    found = linear.linear(x_TD, packed)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_other_weights_take_the_plain_form() -> None:
    assert isinstance(linear.pack(_weights(8, 8, torch.float64)), linear_cpu.CpuPackedLinear)
    assert isinstance(linear.pack(_weights(8, 7)), linear_cpu.CpuPackedLinear)


def test_noise_is_the_references() -> None:
    seed_N, position_N = torch.tensor([0, -3, 2**62, 0, 7]), torch.tensor([0, 5, 1 << 40, 0, 9])
    found = sampling.gumbel(seed_N, position_N, 65)
    torch.testing.assert_close(found, reference.gumbel(seed_N, position_N, 65), rtol=2e-6, atol=2e-6)
    assert torch.equal(found[0], found[3])


def test_noise_at_the_ends_of_its_range() -> None:
    """Of two million words some are next to 0 and 1; the torch kernel keeps all their digits."""
    seed_N, position_N = torch.arange(64), torch.arange(64) * 17
    found, wanted = (form.gumbel(seed_N, position_N, 1 << 15) for form in (sampling, cpu))
    assert found.isfinite().all() and found.max() > 13 and found.min() < -2.6
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [1, 5, 63, 65, 4096])
@pytest.mark.parametrize("count", [1, 4, 64])
def test_ranking_is_the_references(vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab + count)
    scores_NV = torch.randn(4, vocab, generator=generator)
    scores_NV[1] = scores_NV[1].round()  # many ties
    scores_NV[2, vocab // 2 :] = -math.inf
    scores_NV[3] = -math.inf
    token_NC, share_NC = sampling.topk(scores_NV, count)
    wanted_NC, wanted_share_NC = reference.topk(scores_NV, count)
    assert torch.equal(token_NC, wanted_NC)
    torch.testing.assert_close(share_NC, wanted_share_NC, rtol=2e-6, atol=1e-7)


def test_probabilities_of_a_large_vocabulary_equal_float64() -> None:
    """Rounded scores have few values, whose exponentials would repeat the same rounding error."""
    scores_NV = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(0))
    scores_NV[1] = scores_NV[1].round()
    token_NC, share_NC = sampling.topk(scores_NV, 64)
    wanted_NC = scores_NV.double().softmax(-1).gather(-1, token_NC)
    torch.testing.assert_close(share_NC.double(), wanted_NC, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize(
    "odd", [{7: math.nan}, {7: math.inf}, {0: math.nan, 5: 2.0, 7: math.inf, 39: math.nan}]
)
def test_ranking_of_nan(odd: dict[int, float], count: int) -> None:
    """NaN ranks above all numbers, and other rows are unaffected."""
    scores_NV = torch.randn(3, 40, generator=torch.Generator().manual_seed(count)).round()
    for token, score in odd.items():
        scores_NV[1, token] = score
    token_NC, share_NC = sampling.topk(scores_NV, count)
    wanted_NC, wanted_share_NC = reference.topk(scores_NV, count)
    assert torch.equal(token_NC, wanted_NC)
    torch.testing.assert_close(share_NC, wanted_share_NC, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_ranked_by_logits_over_temperature_plus_noise(dtype: torch.dtype) -> None:
    """To the last bit: siblings share noise, a greedy row between them has none, and positions repeat."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = (torch.randn(7, 301, generator=generator) * 4).to(dtype)
    rules = Rules(torch.tensor([1.0, 0.7, 0.0, 0.7, 1.3, 0.0, 1.0]))
    seed_N, position_N = torch.tensor([3, 3, 3, 3, 9, 9, 3]), torch.tensor([5, 5, 5, 5, 5, 6, 5])
    compared_NV = cpu.perturb(logits_NV, rules, seed_N, position_N, sampling.gumbel)
    assert torch.equal(sampling._perturb(logits_NV, rules, seed_N, position_N), compared_NV)
    before_NV = logits_NV.clone()
    assert torch.equal(sampling.sample(logits_NV, rules, seed_N, position_N), compared_NV.max(-1).indices)
    found, wanted = (
        sampling.topk_with_noise(logits_NV, rules, seed_N, position_N, 5),
        sampling.topk(compared_NV, 5),
    )
    assert all(map(torch.equal, found, wanted)) and torch.equal(logits_NV, before_NV)
    logits_NV[4, 8] = math.nan
    assert sampling.sample(logits_NV, rules, seed_N, position_N)[4] == NO_TOKEN
