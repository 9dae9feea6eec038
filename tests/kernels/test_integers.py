"""Weights of whole numbers: how they are rounded, and their products in C against exact sums."""

import pytest
import torch
from torch import Tensor

from specdec.kernels.linear import integers
from specdec.kernels.linear.integers import GROUP, INT4, INT8, Rounding
from specdec.kernels.linear.matrix import expert_of, join, widen
from specdec.kernels.native import compiled, linear
from tests.tolerances import KERNEL

FORMATS = pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
in_c = pytest.mark.skipif(compiled.compiled() is None, reason="there is no C compiler")


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise, size = (torch.randn(shape, generator=generator) for _ in range(2))
    return noise * torch.exp(size)


@FORMATS
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 65), (16, 96)])
def test_rounding_loses_at_most_a_step(form: Rounding, outputs: int, inputs: int) -> None:
    exact_ND = draw(outputs, inputs)
    rounded = form.quantise(exact_ND)
    step_ND = rounded.scale[:, None] if form.bits == 8 else rounded.scale.repeat_interleave(GROUP, 1)
    error_ND = (widen(rounded) - exact_ND).abs()
    # Half of one to nearest; of 4 bits there is no 8 opposite -8, and the scale is fitted afterwards.
    assert (error_ND <= (0.501 if form.bits == 8 else 1.2) * step_ND.abs()[:, :inputs]).all()
    assert rounded.number_ND.abs().max() <= (127 if form.bits == 8 else 8)


@FORMATS
def test_zeros_stay_zeros(form: Rounding) -> None:
    assert not widen(form.quantise(torch.zeros(3, 70))).any()


@FORMATS
def test_experts_are_rounded_each_for_itself(form: Rounding) -> None:
    exact_END = draw(3, 20, 70)
    rounded = form.quantise(exact_END)
    for expert, exact_ND in enumerate(exact_END):
        alone = widen(form.quantise(exact_ND))
        assert torch.equal(widen(expert_of(rounded, expert)), alone)
        assert torch.equal(widen(rounded)[expert], alone)


def test_alike_parts_are_joined() -> None:
    parts = [INT8.quantise(draw(5, 64)), INT8.quantise(draw(3, 64)), INT4.quantise(draw(2, 64)), draw(4, 64)]
    joined = join(parts)
    assert [part.shape[0] for part in joined] == [8, 2, 4]
    assert torch.equal(torch.cat([*map(widen, joined)]), torch.cat([*map(widen, parts)]))


@in_c
@TYPES
@FORMATS
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 8, 19])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (15, 40), (70, 320), (130, 200)])
def test_products_are_those_of_rounded_rows(
    form: Rounding, dtype: torch.dtype, tokens: int, outputs: int, inputs: int
) -> None:
    matrix, bias_N = form.quantise(draw(outputs, inputs).to(dtype)), draw(outputs, seed=1).to(dtype)
    x_TD = draw(tokens, inputs, seed=2).to(dtype)
    found = linear.linear(x_TD, linear.pack(matrix, bias_N))
    wanted = (integers.multiply(x_TD, matrix) + bias_N.double()).to(dtype)
    size = float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=KERNEL[dtype], atol=KERNEL[dtype] * size)


@in_c
@TYPES
@FORMATS
def test_a_rows_product_does_not_depend_on_its_window(form: Rounding, dtype: torch.dtype) -> None:
    packed, x_TD = linear.pack(form.quantise(draw(200, 96).to(dtype))), draw(67, 96, seed=1).to(dtype)
    whole = linear.linear(x_TD, packed)
    for width in range(1, 10):
        assert torch.equal(torch.cat([linear.linear(part, packed) for part in x_TD.split(width)]), whole)


@in_c
def test_parts_of_several_formats_write_beside_each_other() -> None:
    exact = [draw(rows, 64, seed=rows) for rows in (20, 7, 33)]
    parts = [INT8.quantise(exact[0]), exact[1], INT4.quantise(exact[2])]
    bias_N, x_TD = draw(60, seed=9), draw(5, 64, seed=8)
    found = linear.linear(x_TD, linear.pack(parts, bias_N))
    alone = torch.cat([linear.linear(x_TD, linear.pack(part)) for part in parts], 1)
    assert torch.equal(found, alone + bias_N)


@in_c
@FORMATS
def test_what_is_no_number_stays_none_and_harms_no_other_row(form: Rounding) -> None:
    packed, x_TD = linear.pack(form.quantise(draw(20, 96))), draw(4, 96, seed=1)
    right = linear.linear(x_TD, packed)
    x_TD[1, 40], x_TD[3, 0] = torch.nan, torch.inf
    found = linear.linear(x_TD, packed)
    assert found[[1, 3]].isnan().all() and torch.equal(found[[0, 2]], right[[0, 2]])
