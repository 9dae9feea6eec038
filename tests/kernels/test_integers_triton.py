"""Integer weights times 16-bit activations in Triton, against dequantized weights in float32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.kernels.linear import reference, triton
from specdec.kernels.linear.integers import GROUP, INT4, INT8, Integers, Rounding
from specdec.kernels.linear.matrix import Matrix, widen
from specdec.kernels.linear.triton_integers import Tiles, lay_tiles
from specdec.kernels.moe import reference as moe_reference
from specdec.kernels.moe import triton as moe
from specdec.models.families import network
from specdec.models.shapes import SHAPES
from tests.kernels.interpreter import poison
from tests.selection import only
from tests.tolerances import KERNEL, KERNEL_FLOAT16

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Without a GPU, kernels are interpreted."""
FORMATS = pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
CUT = 1030
"""A number of columns that is split between programs."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def draw_matrix(form: Rounding, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Integers:
    """Draw a matrix with varying magnitudes, so that misplaced scales are detected."""
    size = draw(*shape[:-1], 1, seed=seed + 100).exp() * draw(*shape, seed=seed + 200).mul(0.3).exp()
    return form.quantise((draw(*shape, seed=seed) * size * shape[-1] ** -0.5).to(dtype))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare relative to the largest entry: small ones are differences of large products."""
    assert actual.dtype == expected.dtype
    tolerance = KERNEL_FLOAT16 if expected.dtype == torch.float16 else KERNEL[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def unpack(tiles: Tiles) -> Tensor:
    """Extract a matrix's numbers from its tiles, one by one."""
    rows, columns = tiles.shape
    number_ND = torch.empty(rows, columns, dtype=torch.int8)
    for row in range(rows):
        for column in range(columns):
            line = tiles.number[row // 16, column // 64, row % 16]
            place = column % 64
            if tiles.bits == 8:
                number_ND[row, column] = line[place]
            else:
                byte = int(line[place % 32])
                number_ND[row, column] = (byte & 15) - 8 if place < 32 else byte >> 4
    return number_ND


@FORMATS
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 65), (16, 96), (17, 130)])
def test_tiles_hold_each_number_once(form: Rounding, rows: int, columns: int) -> None:
    matrix = draw_matrix(form, rows, columns)
    tiles = lay_tiles(matrix)
    assert torch.equal(unpack(tiles), matrix.number_ND.cpu())
    filled = tiles.number.cpu()
    held = ((filled & 15) - 8, filled >> 4) if form.bits == 4 else (filled,)
    assert sum(own.count_nonzero() for own in held) == matrix.number_ND.count_nonzero()


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "nemotron-h-8b", "qwen3.5-27b"])
@FORMATS
def test_tiles_take_the_bytes_of_the_footprint(form: Rounding, name: str) -> None:
    described = network(SHAPES[name])
    for layer in described.layers[:4]:
        for part in layer.parts:
            for rows, columns in part.matrices(described.hidden).values():
                if rows % 16 == 0 and columns % 64 == 0:
                    tiles = lay_tiles(form.empty((rows, columns), torch.bfloat16, torch.device("meta")))
                    assert tiles.number.nbytes + tiles.scale.nbytes == form.num_bytes((rows, columns))


@TYPES
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
@FORMATS
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 4, 1), (1, 33, 63), (3, 140, CUT), (16, 65, 128), (17, 70, 300), (63, 16, 65), (65, 130, 65)],
)
def test_products_equal_dequantised_weights(
    tokens: int,
    rows: int,
    columns: int,
    form: Rounding,
    with_bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x_TD, matrix = draw(tokens, columns, dtype=dtype), draw_matrix(form, rows, columns, dtype=dtype)
    bias_N = draw(rows, dtype=dtype, seed=2) if with_bias else None
    packed = triton.pack(matrix, bias_N)
    poison(monkeypatch)
    assert_close(triton.linear(x_TD, packed), reference.linear(x_TD, reference.pack(matrix, bias_N)))


@pytest.mark.parametrize("tokens", [3, 20, 70])
def test_parts_follow_each_other(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a layer: integer parts, and beside them unquantized ones."""
    x_TD, bias_N = draw(tokens, 130, dtype=torch.bfloat16), draw(90, dtype=torch.bfloat16, seed=2)
    given = {"dtype": torch.bfloat16}
    parts: list[Matrix] = [draw_matrix(INT4, 50, 130, **given), draw(7, 130, **given, seed=3)]
    parts.append(draw_matrix(INT8, 33, 130, **given, seed=4))
    packed = triton.pack(parts, bias_N)
    poison(monkeypatch)
    assert_close(triton.linear(x_TD, packed), reference.linear(x_TD, reference.pack(parts, bias_N)))


@TYPES
@FORMATS
@pytest.mark.parametrize("columns", only({130}, [130, CUT]))
def test_a_row_does_not_depend_on_its_window(columns: int, form: Rounding, dtype: torch.dtype) -> None:
    """Bit for bit up to 64 tokens, in tiles of each height, whatever the other rows hold."""
    weight = triton.pack(draw_matrix(form, 20, columns, dtype=dtype))
    assert (triton.integer_tiling(draw(1, columns), 20).split > 1) == (columns == CUT)
    x_TD = draw(64, columns, dtype=dtype)
    alone = triton.linear(x_TD[:1], weight)
    for tokens in (2, 17, 64):
        assert torch.equal(triton.linear(x_TD[:tokens], weight)[:1], alone)
        assert torch.equal(triton.linear(x_TD[:tokens].flip(0), weight)[-1:], alone)
    x_TD[1:] = torch.nan
    assert torch.equal(triton.linear(x_TD, weight)[:1], alone)


def test_parts_that_depend_on_the_window_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same tile, split along its columns for one token only."""
    weight, x_TD, tiling = triton.pack(draw_matrix(INT4, 40, CUT)), draw(2, CUT), triton.integer_tiling

    def mutated(x_TD: Tensor, rows: int) -> triton.LinearTiling:
        return tiling(x_TD, rows)._replace(split=2 if len(x_TD) == 1 else 1)

    monkeypatch.setattr(triton, "integer_tiling", mutated)
    assert not torch.equal(triton.linear(x_TD, weight)[:1], triton.linear(x_TD[:1], weight))


def halves_swapped(tiles: Tiles) -> Tiles:
    return tiles._replace(number=tiles.number << 4 | tiles.number >> 4 & 15)


def scales_moved(tiles: Tiles) -> Tiles:
    return tiles._replace(scale=tiles.scale.roll(1, -1).contiguous())


def rows_moved(tiles: Tiles) -> Tiles:
    return tiles._replace(scale=tiles.scale.roll(1, 0).contiguous())


def panels_moved(tiles: Tiles) -> Tiles:
    return tiles._replace(number=tiles.number.roll(1, 0).contiguous())


@pytest.mark.parametrize("mutate", [halves_swapped, scales_moved, rows_moved, panels_moved])
@pytest.mark.parametrize("tokens", [1, 20, 66])
def test_misplaced_weights_and_scales_are_detected(tokens: int, mutate: Callable[[Tiles], Tiles]) -> None:
    matrix, x_TD = draw_matrix(INT4, 48, 3 * GROUP), draw(tokens, 3 * GROUP)
    expected = x_TD @ widen(matrix).T
    packed = triton.pack(matrix)
    assert_close(triton.linear(x_TD, packed), expected)
    (part,) = packed.parts
    assert isinstance(part.weight, Tiles)
    mutated = packed._replace(parts=(part._replace(weight=mutate(part.weight)),))
    with pytest.raises(AssertionError):
        assert_close(triton.linear(x_TD, mutated), expected)


def choose(tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    index_TA = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)])
    return index_TA.to(DEVICE), torch.rand(tokens, top_k, generator=generator).to(DEVICE)


def draw_experts(
    form: Rounding, num_experts: int, width: int, hidden: int, *, gated: bool, dtype: torch.dtype
) -> tuple[Integers, Integers]:
    up = draw_matrix(form, num_experts, width * (2 if gated else 1), hidden, dtype=dtype)
    return up, draw_matrix(form, num_experts, hidden, width, dtype=dtype, seed=5)


@TYPES
@FORMATS
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "width", "hidden", "gated"),
    [
        (1, 1, 1, 1, 1, True),
        (1, 5, 2, 63, 65, False),
        (2, 3, 2, 70, 65, True),
        (3, 2, 1, 140, 130, False),
        (16, 5, 3, 8, 16, False),
        (17, 5, 2, 7, 33, True),
        (40, 2, 1, 40, 8, False),
        (65, 2, 2, 72, 8, True),
        (140, 1, 1, 72, 8, True),
        (140, 1, 1, 63, 8, False),
    ],
)
def test_experts_equal_dequantised_weights(
    tokens: int,
    num_experts: int,
    top_k: int,
    width: int,
    hidden: int,
    gated: bool,
    form: Rounding,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x_TD = draw(tokens, hidden, dtype=dtype)
    weights = draw_experts(form, num_experts, width, hidden, gated=gated, dtype=dtype)
    index_TA, weight_TA = choose(tokens, num_experts, top_k)
    packed = [moe.pack_experts(weight) for weight in weights]
    if tokens <= moe.NARROW_WINDOW:  # wider windows plan in integers, which hold no NaN
        poison(monkeypatch)
    found = moe.experts(x_TD, *packed, index_TA, weight_TA, gated=gated)
    assert_close(found, moe_reference.experts(x_TD, *weights, index_TA, weight_TA, gated=gated))


@FORMATS
@pytest.mark.parametrize("num_experts", [3, 12])
def test_a_token_does_not_depend_on_its_window_among_experts(num_experts: int, form: Rounding) -> None:
    """Bit for bit up to 64 tokens, of which few or most choose an expert."""
    weights = draw_experts(form, num_experts, 20, 65, gated=True, dtype=torch.bfloat16)
    packed = [moe.pack_experts(weight) for weight in weights]
    x_TD, (index_TA, weight_TA) = draw(64, 65, dtype=torch.bfloat16), choose(64, num_experts, 3)
    alone = moe.experts(x_TD[:1], *packed, index_TA[:1], weight_TA[:1], gated=True)
    heights = set()
    for tokens in (2, 17, 64):
        heights.add(moe.integer_tiling(moe._height(3 * tokens, num_experts), torch.bfloat16, gated=True))
        found = moe.experts(x_TD[:tokens], *packed, index_TA[:tokens], weight_TA[:tokens], gated=True)
        assert torch.equal(found[:1], alone)
    assert len(heights) == (2 if num_experts == 3 else 1)
    x_TD[1:] = torch.nan
    index_TA[1:] = index_TA[0]
    assert torch.equal(moe.experts(x_TD, *packed, index_TA, weight_TA, gated=True)[:1], alone)


@FORMATS
@pytest.mark.parametrize("tokens", [1, 9, 20])
def test_experts_that_were_not_chosen_are_not_read(tokens: int, form: Rounding) -> None:
    weights = draw_experts(form, 12, 8, 16, gated=True, dtype=torch.float32)
    packed = [moe.pack_experts(weight) for weight in weights]
    (index_TA, weight_TA), x_TD = choose(tokens, 6, 2), draw(tokens, 16)
    expected = moe.experts(x_TD, *packed, index_TA, weight_TA, gated=True)
    idle_E = torch.ones(12, dtype=torch.bool, device=DEVICE)
    idle_E[index_TA.flatten()] = False
    for tiles in packed:
        assert isinstance(tiles, Tiles)
        tiles.scale[idle_E] = torch.nan
    assert torch.equal(moe.experts(x_TD, *packed, index_TA, weight_TA, gated=True), expected)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_misplaced_expert_scales_are_detected(tokens: int, axis: int) -> None:
    up, down = draw_experts(INT4, 3, 33, 65, gated=True, dtype=torch.float32)
    x_TD, routed = draw(tokens, 65), choose(tokens, 3, 2)
    expected = moe_reference.experts(x_TD, up, down, *routed, gated=True)
    packed = moe.pack_experts(up), moe.pack_experts(down)
    assert_close(moe.experts(x_TD, *packed, *routed, gated=True), expected)
    moved = up._replace(scale=up.scale.roll(1, axis).contiguous())
    with pytest.raises(AssertionError):
        assert_close(moe.experts(x_TD, moe.pack_experts(moved), packed[1], *routed, gated=True), expected)
