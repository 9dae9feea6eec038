"""The interpreter's float sums: their bits depend only on their own terms."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted")
LENGTH, SIDE = 64, 64
TILES = [(1, 64), (16, 16), (32, 64), (64, 1)]
DTYPES = [torch.float32, torch.bfloat16]


@triton.jit
def _multiply(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, ACROSS: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left = tl.load(a + m[:, None] * K + k[None, :])
    if ACROSS:
        right = tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
    else:
        right = tl.load(b + n[None, :] * K + k[:, None])
    product = tl.dot(left, right, tl.full([M, N], 1.0, tl.float32), input_precision="tf32x3")
    tl.store(out + m[:, None] * N + n[None, :], product)


@triton.jit
def _sum(x, out, M: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    if AXIS == 1:
        terms = tl.load(x + m[:, None] * K + k[None, :])
    else:
        terms = tl.load(x + m[None, :] * K + k[:, None])
    tl.store(out + m, tl.sum(terms, AXIS))


def draw(rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(rows, LENGTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiply(a_MK: Tensor, b_NK: Tensor, across: bool) -> Tensor:
    (rows, length), columns = a_MK.shape, len(b_NK)
    out_MN = torch.full((rows, columns), torch.nan)
    _multiply[(1,)](a_MK.contiguous(), b_NK.contiguous(), out_MN, rows, length, columns, across)
    return out_MN


def total(x_MK: Tensor, axis: int) -> Tensor:
    out_M = torch.full((len(x_MK),), torch.nan, dtype=x_MK.dtype)
    _sum[(1,)](x_MK.contiguous(), out_M, *x_MK.shape, axis)
    return out_M


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("across", [False, True])
def test_an_entry_of_a_product_does_not_depend_on_its_tile(across: bool, dtype: torch.dtype) -> None:
    """NumPy's matmul fails here with every BLAS kernel tried, AVX-512 to SSE3."""
    a_MK, b_NK = draw(SIDE, dtype, 0), draw(SIDE, dtype, 1)
    whole_MN = multiply(a_MK, b_NK, across)
    torch.testing.assert_close(whole_MN, 1 + a_MK.float() @ b_NK.float().T, rtol=1e-5, atol=1e-5)
    for rows, columns in TILES:
        for m in range(0, SIDE, rows):
            for n in range(0, SIDE, max(columns, 16)):
                own = multiply(a_MK[m : m + rows], b_NK[n : n + columns], across)
                assert torch.equal(own, whole_MN[m : m + rows, n : n + columns])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_an_entry_of_a_sum_does_not_depend_on_its_tile(axis: int, dtype: torch.dtype) -> None:
    """NumPy's sum fails here: without another axis it adds eight terms at a time."""
    x_MK = draw(SIDE, dtype, 0)
    whole_M = total(x_MK, axis)
    torch.testing.assert_close(whole_M, x_MK.sum(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(whole_M, total(x_MK, 1 - axis))
    for rows in (1, 2, 16):
        for m in range(0, SIDE, rows):
            assert torch.equal(total(x_MK[m : m + rows], axis), whole_M[m : m + rows])


@pytest.mark.parametrize("length", [1, 2, 16, 128])
def test_halves_are_added_until_one_is_left(length: int) -> None:
    terms = draw(length, torch.float32, 0).numpy()
    expected = terms
    while len(expected) > 1:
        half = len(expected) // 2
        expected = np.array([expected[i] + expected[half + i] for i in range(half)])
    assert np.array_equal(interpreter.fold(terms), expected[0])
