"""8-bit weights: rounding, dequantization, joining and row selection, against loops."""

import pytest
import torch
from torch import Tensor

from specdec.kernels.linear import cpu, fp8, reference
from specdec.kernels.linear.fp8 import BLOCK, Fp8
from specdec.kernels.linear.matrix import expert_of, join, widen
from specdec.kernels.moe import cpu as moe_cpu
from specdec.kernels.moe import reference as moe_reference
from tests.tolerances import KERNEL

sizes = pytest.mark.parametrize(("rows", "columns"), [(1, 1), (63, 65), (128, 256), (300, 129)])
FINENESS = 2**-4
"""Relative error of a number with three mantissa bits: half a step."""
SMALLEST = 2**-10 / 448
"""Half of the smallest step, relative to the largest entry of a block."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw entries whose magnitudes vary, so that no two blocks are alike."""
    generator = torch.Generator().manual_seed(seed)
    noise, size = (torch.randn(shape, generator=generator) for _ in range(2))
    return noise * torch.exp(2 * size)


def by_loops(matrix: Fp8) -> Tensor:
    wide = torch.empty(matrix.shape, dtype=torch.float64)
    for row in range(wide.shape[0]):
        for column in range(wide.shape[1]):
            scale = matrix.scale_MK[row // BLOCK, column // BLOCK].double()
            wide[row, column] = matrix.weight_ND[row, column].double() * scale
    return wide


@sizes
def test_rounding_loses_at_most_half_a_step(rows: int, columns: int) -> None:
    exact_ND = draw(rows, columns)
    rounded = fp8.quantise(exact_ND)
    assert rounded.shape == exact_ND.shape and rounded.dtype == torch.float32
    assert rounded.scale_MK.shape == fp8.block_shape(exact_ND.shape)
    largest_MK = torch.stack(
        [torch.stack([b.abs().max() for b in r.split(BLOCK, 1)]) for r in exact_ND.split(BLOCK)]
    )
    largest_ND = fp8.spread(largest_MK, exact_ND.shape)
    error_ND = (widen(rounded) - exact_ND).abs()
    assert (error_ND <= FINENESS * exact_ND.abs() + 1.01 * SMALLEST * largest_ND).all()
    torch.testing.assert_close(rounded.scale_MK * fp8.LARGEST, largest_MK)


def test_zeros_stay_zeros() -> None:
    for rounded in (fp8.quantise(torch.zeros(130, 2)), fp8.quantise(torch.full((1, 1), 1e-45))):
        assert (rounded.scale_MK == 1).all() or (rounded.scale_MK > 0).all()
        assert widen(rounded).isfinite().all()
    assert (widen(fp8.quantise(torch.zeros(130, 2))) == 0).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (130, 129)])
def test_widening_takes_each_block_by_its_scale(rows: int, columns: int) -> None:
    rounded = fp8.quantise(draw(rows, columns))
    torch.testing.assert_close(widen(rounded).double(), by_loops(rounded), rtol=2**-24, atol=0)
    assert widen(rounded, torch.bfloat16).dtype == torch.bfloat16
    swapped = rounded._replace(scale_MK=rounded.scale_MK.flip(0, 1))
    assert rows == 1 or not torch.equal(widen(swapped), widen(rounded))


def test_experts_are_rounded_each_for_itself() -> None:
    exact_END = draw(3, 130, 140)
    rounded = fp8.quantise(exact_END)
    assert rounded.scale_MK.shape == (3, 2, 2)
    for expert, exact_ND in enumerate(exact_END):
        own, alone = expert_of(rounded, expert), fp8.quantise(exact_ND)
        assert torch.equal(widen(own), widen(alone))
        assert torch.equal(widen(rounded)[expert], widen(alone))


def test_parts_are_joined_where_blocks_stay_whole() -> None:
    a, b, c = (fp8.quantise(draw(rows, 130, seed=rows)) for rows in (256, 100, 128))
    dense = draw(7, 130)
    joined = join([a, b, c, dense, dense])
    assert [part.shape[0] for part in joined] == [356, 128, 14]
    expected = torch.cat([*map(widen, (a, b, c)), dense, dense])
    assert torch.equal(torch.cat([widen(part) for part in joined]), expected)
    for ops in (cpu, reference):
        x_TD = draw(3, 130)
        found = ops.linear(x_TD, ops.pack(joined))
        torch.testing.assert_close(found, x_TD @ expected.T, rtol=1e-4, atol=1e-2)


def test_rows_are_selected_only_in_whole_blocks() -> None:
    rounded = fp8.quantise(draw(512, 130))
    by_block_N = torch.arange(512).view(4, BLOCK)[[2, 0, 3]].flatten()
    for whole_N in (by_block_N, by_block_N[:-1], by_block_N.flip(0)):
        chosen = fp8.choose_rows(rounded, whole_N)
        assert chosen is not None
        assert torch.equal(widen(chosen), widen(rounded)[whole_N])
    for torn_N in (by_block_N + 1, by_block_N[1:], by_block_N.view(2, -1).T.flatten()):
        assert fp8.choose_rows(rounded, torn_N % 512) is None


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_equal_those_of_the_widened_weight(rows: int, columns: int, dtype: torch.dtype) -> None:
    rounded = fp8.quantise(draw(rows, columns).to(dtype))
    x_TD, bias_N = draw(5, columns, seed=1).to(dtype), draw(rows, seed=2).to(dtype)
    expected = (x_TD.double() @ by_loops(rounded).T + bias_N.double()).to(dtype)
    size = float(expected.abs().max())
    for ops in (cpu, reference):
        found = ops.linear(x_TD, ops.pack(rounded, bias_N))
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype] * size)


def test_experts_run_in_eight_bits() -> None:
    up, down = fp8.quantise(draw(4, 2 * 24, 40)), fp8.quantise(draw(4, 40, 24, seed=1))
    x_TD, index_TA = draw(3, 40, seed=2), torch.tensor([[0, 3], [3, 1], [2, 0]])
    weight_TA = torch.rand(3, 2, generator=torch.Generator().manual_seed(0))
    wide = [widen(matrix) for matrix in (up, down)]
    expected = moe_reference.experts(x_TD, *wide, index_TA, weight_TA, gated=True)
    for ops in (moe_cpu, moe_reference):
        packed = [ops.pack_experts(matrix) for matrix in (up, down)]
        found = ops.experts(x_TD, *packed, index_TA, weight_TA, gated=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
