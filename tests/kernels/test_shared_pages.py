"""The C kernel reads pages shared by several rows once; each row's bits are those it has alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.kernels.group import Group
from specdec.kernels.native.attention import self_attention
from specdec.kernels.native.compiled import compiled
from specdec.kernels.self_attention.layer import AttentionLayer

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no C compiler")

ROWS, BLOCK, DIM = 24, 16, 24
SIZES = (128, 113, 100, 65, 64, 63, 33, 32, 31, 15, 1, 0)
LENGTH_B = torch.tensor([SIZES[b % len(SIZES)] for b in range(ROWS)])
"""The first is the longest; some are shorter than the shared prefix of others."""


def tables(shared: tuple[int, ...], blocks: int) -> Tensor:
    """Give each row its own blocks, except at the `shared` positions that it has filled."""
    table_BN = 1 + torch.arange(ROWS * blocks).view(ROWS, blocks)
    for place in shared:
        table_BN[BLOCK * (place + 1) <= LENGTH_B, place] = table_BN[0, place]
    return table_BN


def make_layer(heads: int, kv_heads: int, window: int | None) -> AttentionLayer:
    return AttentionLayer(
        *(heads, kv_heads, DIM, DIM**-0.5, False),
        q_norm_D=None,
        k_norm_D=None,
        eps=0.0,
        wide_rotation=False,
        window=window,
    )


def outputs(
    shared: tuple[int, ...],
    layer: AttentionLayer,
    *,
    width: int,
    tree: bool,
    dtype: torch.dtype,
    alone: bool,
) -> Tensor:
    """Run rows over one set of pages, together or one by one."""
    generator = torch.Generator().manual_seed(width)
    blocks = (max(SIZES) + width) // BLOCK + 1
    pages = torch.randn(1 + ROWS * blocks, 2, BLOCK, layer.kv_heads, DIM, generator=generator).to(dtype)
    pages[0] = torch.nan
    columns = (layer.heads + 2 * layer.kv_heads) * DIM
    x_TN = torch.randn(ROWS * width, columns, generator=generator).to(dtype)
    star_MM = torch.eye(width, dtype=torch.bool)
    star_MM[:, 0] = True
    none_B = torch.zeros(ROWS, dtype=torch.int64)
    whole = Group(
        *(0, ROWS, width, none_B, None, None, None, None),
        star_MM.expand(ROWS, -1, -1).contiguous() if tree else None,
        *(None, tables(shared, blocks), LENGTH_B, max(SIZES)),
    )
    if not alone:
        return self_attention(x_TN, layer, None, pages, whole)
    rows = [
        replace(
            whole,
            rows=1,
            state_B=none_B[b : b + 1],
            table_BN=whole.table_BN[b : b + 1],
            length_B=LENGTH_B[b : b + 1],
            ancestors_BMM=None if whole.ancestors_BMM is None else whole.ancestors_BMM[b : b + 1],
        )
        for b in range(ROWS)
    ]
    return torch.cat(
        [self_attention(x_TN[b * width :][:width], layer, None, pages, row) for b, row in enumerate(rows)]
    )


@pytest.mark.parametrize("shared", [(), (0,), (0, 1), (0, 1, 2, 3, 4), (0, 2, 3), (1, 2)], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(4, 2, None), (3, 3, None), (15, 3, None), (4, 2, 20)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_with_common_pages_have_the_bits_they_have_alone(
    shared: tuple[int, ...], heads: int, kv_heads: int, window: int | None, dtype: torch.dtype
) -> None:
    layer = make_layer(heads, kv_heads, window)
    for width in (1, 2, 3, 5):
        for tree in (False, True):
            together, apart = (
                outputs(shared, layer, width=width, tree=tree, dtype=dtype, alone=alone)
                for alone in (False, True)
            )
            assert together.isfinite().all()
            assert torch.equal(together, apart), (width, tree)


def test_what_is_shared_counts() -> None:
    """The control: rows with other pages there have other outputs."""
    layer = make_layer(4, 2, None)
    one, other = (
        outputs(shared, layer, width=1, tree=False, dtype=torch.float32, alone=False)
        for shared in ((0, 1, 2), (0, 2))
    )
    differ = (one != other).any(-1)
    assert torch.equal(differ[1:], LENGTH_B[1:] >= 2 * BLOCK), "all that have filled the second"
