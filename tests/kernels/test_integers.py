"""Integer weights: their rounding, and their products in C against exact sums."""

import pytest
import torch
from torch import Tensor

from specdec.kernels.linear import integers
from specdec.kernels.linear.integers import GROUP, HALF, INT4, INT8, Integers, Rounding
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
    # Half a step when rounding to nearest; 4 bits have no 8 opposite -8, and the scale is fitted afterwards.
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
def test_products_equal_those_of_rounded_rows(
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
def test_nan_stays_nan_and_affects_no_other_row(form: Rounding) -> None:
    packed, x_TD = linear.pack(form.quantise(draw(20, 96))), draw(4, 96, seed=1)
    right = linear.linear(x_TD, packed)
    x_TD[1, 40], x_TD[3, 0] = torch.nan, torch.inf
    found = linear.linear(x_TD, packed)
    assert found[[1, 3]].isnan().all() and torch.equal(found[[0, 2]], right[[0, 2]])


OTHERS = [
    *((8, "symmetric"), (6, "symmetric"), (6, "offsets"), (4, "offsets")),
    *((8, "halves"), (6, "halves"), (4, "halves")),
]
"""Formats found in GGUF files."""


def of_file(bits: int, kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> Integers:
    """Draw a matrix in a GGUF file's format."""
    generator = torch.Generator().manual_seed(bits)
    middle, group = 1 << bits - 1, HALF if kind == "halves" else GROUP
    number_ND = torch.randint(-middle, middle, shape, generator=generator).to(torch.int8)
    scale_NG = draw(shape[0], -(-shape[1] // group)).half()
    offset_NG = (middle * draw(*scale_NG.shape, seed=3)).half() if kind == "offsets" else None
    return Integers(number_ND, scale_NG, bits, dtype, offset_NG=offset_NG, group=group)


@in_c
@TYPES
@pytest.mark.parametrize(("bits", "kind"), OTHERS)
@pytest.mark.parametrize("shape", [(1, 32), (70, 200), (33, 592)])
def test_products_of_a_files_weights_are_equal_in_every_window(
    bits: int, kind: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    matrix = of_file(bits, kind, dtype, shape)
    x_TD = draw(19, shape[1], seed=2).to(dtype)
    x_TD[0], x_TD[1] = 1.0, -1.0
    packed = linear.pack(matrix)
    whole = linear.linear(x_TD, packed)
    wanted = integers.multiply(x_TD, matrix)
    size = float(wanted.abs().max())
    torch.testing.assert_close(
        whole.double(), wanted, rtol=KERNEL[dtype], atol=KERNEL[dtype] * size, check_dtype=False
    )
    for width in range(1, 10):
        assert torch.equal(torch.cat([linear.linear(part, packed) for part in x_TD.split(width)]), whole)


@in_c
@pytest.mark.parametrize(("bits", "kind"), OTHERS)
def test_a_scale_of_another_group_is_detected(bits: int, kind: str) -> None:
    own, x_TD = of_file(bits, kind, torch.float32, (33, 96)), draw(5, 96)
    right = integers.multiply(x_TD, own)
    changed = [own._replace(scale=own.scale.roll(1, 1)), own._replace(number_ND=own.number_ND.roll(HALF, 1))]
    if own.offset_NG is not None:
        changed.append(own._replace(offset_NG=own.offset_NG.roll(1, 1)))
    for wrong in changed:
        difference = linear.linear(x_TD, linear.pack(wrong)).double() - right
        assert difference.norm() > 0.1 * right.norm()


@pytest.mark.parametrize(("bits", "kind"), OTHERS)
def test_a_files_parts_are_joined_chosen_and_placed(bits: int, kind: str) -> None:
    own = of_file(bits, kind, torch.float32, (5, 96))
    joined = join([own, own])
    assert len(joined) == 1 and torch.equal(widen(joined[0]), torch.cat([widen(own)] * 2))
    order = torch.tensor([4, 0, 0, 3])
    assert torch.equal(widen(own.choose_rows(order)), widen(own)[order])
    experts = own.empty((2, 10, 96))
    for expert in range(2):
        experts.place(own, expert, 0)
        experts.place(own, expert, 5)
    assert torch.equal(widen(experts)[1], torch.cat([widen(own)] * 2))
    assert torch.equal(widen(expert_of(experts, 0)), torch.cat([widen(own)] * 2))
    assert len(join([own, own._replace(bits=5)])) == 2


PUBLISHED = [
    (bits, group, zeros, scales)
    for bits in (4, 8)
    for group in (32, 64, 128, None)
    for zeros in (False, True)
    for scales in (torch.float16, torch.bfloat16)
]


def published(
    bits: int, group: int | None, zeros: bool, scales: torch.dtype, dtype: torch.dtype, shape: tuple[int, int]
) -> Integers:
    """Draw a matrix as published quantized models have it; bfloat16 scales are below float16's range."""
    generator = torch.Generator().manual_seed(bits)
    middle, columns = 1 << bits - 1, -(-shape[1] // GROUP)
    number_ND = torch.randint(-middle, middle, shape, generator=generator).to(torch.int8)
    small = 1.0 if scales == torch.float16 else 1e-7
    scale_NG = (draw(shape[0], columns).abs() * small).to(scales)
    zero_NG = torch.randint(-middle, middle, scale_NG.shape, generator=generator).to(torch.int8)
    each = (group or columns * GROUP) // GROUP
    scale_NG, zero_NG = (
        own[:, ::each].repeat_interleave(each, 1)[:, :columns] for own in (scale_NG, zero_NG)
    )
    return Integers(number_ND, scale_NG, bits, dtype, zero_NG if zeros else None)


@pytest.mark.parametrize("inputs", [64, 200])
@pytest.mark.parametrize("kind", ["symmetric", "offsets", "halves", "zeros"])
def test_widened_weights_equal_the_multiplied_ones(kind: str, inputs: int) -> None:
    """A group with a single activation of 127 is quantized exactly."""
    shape = (5, inputs)
    matrix = (
        published(4, 32, True, torch.float16, torch.float32, shape)
        if kind == "zeros"
        else of_file(6, kind, torch.float32, shape)
    )
    exact_ND = integers.multiply(127 * torch.eye(inputs), matrix).T / 127
    torch.testing.assert_close(matrix.wide().double(), exact_ND, rtol=1e-6, atol=1e-5)
    assert matrix.wide().is_contiguous()


@in_c
@TYPES
@pytest.mark.parametrize(("bits", "group", "zeros", "scales"), PUBLISHED)
def test_products_of_published_weights_are_exact_sums_equal_in_every_window(
    bits: int, group: int | None, zeros: bool, scales: torch.dtype, dtype: torch.dtype
) -> None:
    """Up to 127 times the largest numbers and zero points, which float32 must still represent exactly."""
    matrix, bias_N = published(bits, group, zeros, scales, dtype, (70, 200)), draw(70, seed=1).to(dtype)
    x_TD = draw(19, 200, seed=2).to(dtype)
    x_TD[0], x_TD[1] = 1.0, -1.0
    packed = linear.pack(matrix)
    whole = linear.linear(x_TD, packed)
    wanted = integers.multiply(x_TD, matrix)
    size = float(wanted.abs().max())
    torch.testing.assert_close(
        whole.double(), wanted, rtol=KERNEL[dtype], atol=KERNEL[dtype] * size, check_dtype=False
    )
    for width in range(1, 10):
        assert torch.equal(torch.cat([linear.linear(part, packed) for part in x_TD.split(width)]), whole)
    beside = linear.linear(x_TD, linear.pack(matrix, bias_N)).double()
    torch.testing.assert_close(
        beside, wanted + bias_N.double(), rtol=KERNEL[dtype], atol=KERNEL[dtype] * size
    )


@in_c
def test_symmetric_weights_use_the_plain_kernel() -> None:
    """bfloat16 scales that fit float16 use the plain layout; smaller scales give proportional results."""
    own = published(4, 32, False, torch.float16, torch.float32, (33, 96))
    own = own._replace(scale=own.scale.clamp(1e-2, 1).bfloat16())
    tiny = own._replace(scale=own.scale * 2**-20)
    x_TD = draw(5, 96)
    plain, small = linear.pack(own), linear.pack(tiny)
    assert isinstance(plain, linear.WholePanels) and isinstance(small, linear.WholePanels)
    assert (plain.kind, small.kind) == (linear.SCALES, linear.ZEROS_BFLOAT16)
    assert torch.equal(linear.linear(x_TD, plain) * 2**-20, linear.linear(x_TD, small))


@in_c
def test_zero_points_of_another_group_are_detected() -> None:
    own = published(4, 32, True, torch.float16, torch.float32, (33, 96))
    assert own.zero_NG is not None
    x_TD, moved = draw(5, 96), own._replace(zero_NG=own.zero_NG.roll(1, 1))
    wrong = linear.linear(x_TD, linear.pack(moved)).double() - integers.multiply(x_TD, own)
    assert wrong.norm() > 0.1 * integers.multiply(x_TD, own).norm()


@pytest.mark.parametrize(("bits", "group", "zeros", "scales"), PUBLISHED)
def test_published_parts_are_joined_chosen_and_counted(
    bits: int, group: int | None, zeros: bool, scales: torch.dtype
) -> None:
    own = published(bits, group, zeros, scales, torch.float32, (5, 96))
    joined = join([own, own])
    assert len(joined) == 1 and torch.equal(widen(joined[0]), torch.cat([widen(own)] * 2))
    order = torch.tensor([4, 0, 0, 3])
    assert torch.equal(widen(own.choose_rows(order)), widen(own)[order])
    assert len(join([own, own._replace(zero_NG=None if zeros else own.scale.to(torch.int8))])) == 2
