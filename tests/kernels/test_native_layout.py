"""The layout of integers in C against numpy, byte for byte."""

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.kernels.linear.integers import GROUP, HALF, INT4, INT8, Integers, sixteen_bits
from specdec.kernels.native import linear
from specdec.kernels.native.compiled import compiled
from specdec.kernels.native.linear import PANEL, RAISED
from specdec.kernels.native.threads import without_helpers
from tests.kernels.test_integers import OTHERS, draw, of_file, published
from tests.selection import EXHAUSTIVE

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no C compiler")


def laid_numbers(matrix: Integers) -> np.ndarray:
    """Lay numbers out as described in integer.inc."""
    (outputs, inputs), bits = matrix.shape, matrix.bits
    panels, groups = -(-outputs // PANEL), -(-inputs // GROUP)
    filled = np.zeros((panels * PANEL, groups * GROUP), np.uint8)
    filled[:outputs, :inputs] = matrix.number_ND.numpy().view(np.uint8)
    filled = filled + np.uint8(RAISED[bits])
    fours = filled.reshape(panels, PANEL, groups, GROUP // 4, 4).transpose(0, 2, 3, 1, 4)
    if bits == 8:
        return np.ascontiguousarray(fours).reshape(-1)
    first, last = fours[:, :, :4], fours[:, :, 4:]
    lower = first & 15 | (last & 15) << 4
    if bits == 4:
        return np.ascontiguousarray(lower).reshape(-1)
    pair = first >> 4 & 3 | (last >> 4 & 3) << 2
    upper = pair[:, :, ::2] | pair[:, :, 1::2] << 4
    return np.concatenate([lower, upper], axis=2).reshape(-1)


def laid_scales(matrix: Integers) -> Tensor:
    """Lay out scales, and the other per-group values."""
    panels = -(-matrix.shape[0] // PANEL)
    if not matrix.by_group:
        return torch.cat([matrix.scale, torch.zeros(panels * PANEL - len(matrix.scale))])
    is_pair = matrix.group == HALF or matrix.offset_NG is not None
    narrow = None if is_pair else sixteen_bits(matrix.scale)
    scale_NG = matrix.scale.half() if narrow is None else narrow
    beside = [scale_NG]
    if matrix.group == HALF:
        scale_NG = torch.cat([scale_NG, scale_NG.new_zeros(len(scale_NG), scale_NG.shape[1] % 2)], 1)
        beside = [scale_NG[:, ::2], scale_NG[:, 1::2]]
    elif matrix.offset_NG is not None:
        beside.append(matrix.offset_NG.half())
    elif matrix.zero_NG is not None or scale_NG.dtype != torch.float16:
        zero_NG = torch.zeros_like(scale_NG) if matrix.zero_NG is None else matrix.zero_NG
        beside.append((zero_NG / RAISED[matrix.bits]).to(scale_NG.dtype))
    filled = beside[0].new_zeros(panels * PANEL, len(beside), beside[0].shape[1])
    filled[: matrix.shape[0]] = torch.stack(beside, 1)
    return filled.view(panels, PANEL, len(beside), -1).permute(0, 3, 2, 1).contiguous()


def matrices(shape: tuple[int, int]) -> list[Integers]:
    """Draw a matrix of each kind; GGUF files may have float32 scales, which are rounded."""
    scales = (torch.float16, torch.bfloat16)
    found = [form.quantise(draw(*shape)) for form in (INT8, INT4)]
    found += [
        published(bits, 32, zeros, kind, torch.float32, shape)
        for bits in (8, 4)
        for kind in scales
        for zeros in (False, True)
    ]
    found += [of_file(bits, kind, torch.float32, shape) for bits, kind in OTHERS]
    wide = of_file(4, "offsets", torch.float32, shape)
    assert wide.offset_NG is not None
    return [
        *found,
        wide._replace(scale=wide.scale.float() * 1.0001, offset_NG=wide.offset_NG.float() * 1.0001),
    ]


SHAPES = [(1, 1), (1, 32), (15, 31), (16, 64), (17, 33), (65, 63), (63, 65), (70, 200)]
MORE = [pytest.param((n, k), marks=EXHAUSTIVE) for n in (2, 31, 32, 33, 129) for k in (2, 16, 17, 96, 1030)]


@pytest.mark.parametrize("shape", [*SHAPES, *MORE], ids=str)
def test_integers_are_laid_out_byte_for_byte(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is written: memory is filled beforehand."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        for matrix in matrices(shape):
            laid = linear.lay_whole(matrix)
            expected = torch.from_numpy(laid_numbers(matrix))
            assert torch.equal(laid.weight.view(-1), expected), (matrix.bits, laid.kind)
            scale = laid_scales(matrix)
            assert scale.dtype == laid.scale.dtype and torch.equal(scale, laid.scale), (
                matrix.bits,
                laid.kind,
            )
            other = matrix.number_ND.clone()
            other[-1, -1] ^= 1
            changed = linear.lay_whole(matrix._replace(number_ND=other))
            assert not torch.equal(changed.weight.view(-1), expected), "the last number leaves no trace"
    finally:
        torch.use_deterministic_algorithms(False)


def test_layouts_do_not_depend_on_threads() -> None:
    """With more panels than one thread takes, also where torch has no helper threads."""
    matrix = of_file(6, "halves", torch.float32, (1000, 1024))
    shared = linear.lay_whole(matrix)
    with without_helpers():
        within, threads = linear.lay_whole(matrix), torch.get_num_threads()
    assert threads == 1
    assert torch.equal(within.weight, shared.weight) and torch.equal(within.scale, shared.scale)


def test_views_are_laid_out_as_their_copies() -> None:
    """One expert, a range of rows, and every second row."""
    whole = of_file(4, "offsets", torch.float32, (40, 96))
    for rows in (slice(3, 4), slice(20, 40), slice(0, 40, 2)):
        view = whole._each(lambda own, rows=rows: own[rows])  # type: ignore[misc]
        copy = whole._each(lambda own, rows=rows: own[rows].clone())  # type: ignore[misc]
        assert torch.equal(linear.lay_whole(view).weight, linear.lay_whole(copy).weight)
        assert torch.equal(linear.lay_whole(view).scale, linear.lay_whole(copy).scale)
