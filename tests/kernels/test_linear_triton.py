"""Products in Triton against the reference: 8- and 16-bit weights, narrow and wide windows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.kernels.linear import fp8, reference, triton
from specdec.kernels.linear.fp8 import BLOCK, Fp8
from specdec.kernels.linear.matrix import Matrix
from tests.tolerances import KERNEL

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Without a GPU, kernels are interpreted."""
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KINDS: dict[str, Callable[[Tensor], Matrix | list[Matrix]]] = {
    "dense": lambda weight_ND: weight_ND,
    "fp8": fp8.quantise,
    "parts": lambda weight_ND: [*map(fp8.quantise, weight_ND[:-3].split(50)), weight_ND[-3:]],
}
CUT = 1030
"""A number of columns that is split between programs."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare relative to the largest entry: small ones are differences of large products."""
    assert actual.dtype == expected.dtype
    tolerance = KERNEL[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@dtypes
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 4, 1), (1, 33, 63), (3, 140, CUT), (16, 65, 128), (17, 70, 300), (65, 130, 65)],
)
def test_products_equal_reference(
    tokens: int, rows: int, columns: int, kind: str, with_bias: bool, dtype: torch.dtype
) -> None:
    x_TD = draw(tokens, columns, dtype=dtype)
    weight = KINDS[kind](draw(rows, columns, seed=1).mul(columns**-0.5).to(dtype))
    bias_N = draw(rows, dtype=dtype, seed=2) if with_bias else None
    found = triton.linear(x_TD, triton.pack(weight, bias_N))
    assert_close(found, reference.linear(x_TD, reference.pack(weight, bias_N)))


def test_long_rows_are_cut_and_tiles_depend_on_the_weight_alone() -> None:
    assert triton.tiling(3, 140, CUT).split == 2
    assert len({triton.tiling(tokens, 2048, 4096) for tokens in range(1, 17)}) == 1


@pytest.mark.parametrize("kind", ["dense", "fp8"])
def test_a_row_does_not_depend_on_its_window(kind: str) -> None:
    """Bit for bit, whatever the other rows hold."""
    weight = triton.pack(KINDS[kind](draw(40, CUT, seed=1).to(torch.bfloat16)))
    x_TD = draw(9, CUT, dtype=torch.bfloat16)
    alone = triton.linear(x_TD[4:5], weight)
    among = triton.linear(x_TD, weight)[4:5]
    x_TD[5] = torch.nan
    assert torch.equal(alone, among)
    assert torch.equal(alone, triton.linear(x_TD, weight)[4:5])


def test_memory_after_a_weight_is_not_read() -> None:
    """Rows and columns end inside a tile; NaN follows them."""
    rows, columns = 33, 70
    space = torch.full((rows * columns + 4096,), 0x7F, dtype=torch.uint8, device=DEVICE).view(
        torch.float8_e4m3fn
    )
    rounded = fp8.quantise(draw(rows, columns))
    weight_ND = space[: rows * columns].view(rows, columns)
    weight_ND.copy_(rounded.weight_ND)
    own = rounded._replace(weight_ND=weight_ND)
    x_TD = draw(2, columns)
    assert_close(triton.linear(x_TD, triton.pack(own)), reference.linear(x_TD, reference.pack(rounded)))


def transposed(matrix: Fp8) -> Fp8:
    return matrix._replace(scale_MK=matrix.scale_MK.T.reshape(matrix.scale_MK.shape))


def shifted_down(matrix: Fp8) -> Fp8:
    return matrix._replace(scale_MK=matrix.scale_MK.roll(1, 0))


def shifted_right(matrix: Fp8) -> Fp8:
    return matrix._replace(scale_MK=matrix.scale_MK.roll(1, 1))


@pytest.mark.parametrize("mutate", [transposed, shifted_down, shifted_right])
@pytest.mark.parametrize("tokens", [1, 20, 66])
def test_scales_in_other_places_are_seen(tokens: int, mutate: Callable[[Fp8], Fp8]) -> None:
    sizes = draw(2, 3, seed=3).exp()
    rounded = fp8.quantise(draw(2 * BLOCK, 3 * BLOCK) * fp8.spread(sizes, (2 * BLOCK, 3 * BLOCK)))
    x_TD = draw(tokens, 3 * BLOCK, seed=1)
    expected = reference.linear(x_TD, reference.pack(rounded))
    assert_close(triton.linear(x_TD, triton.pack(rounded)), expected)
    with pytest.raises(AssertionError):
        assert_close(triton.linear(x_TD, triton.pack(mutate(rounded))), expected)
