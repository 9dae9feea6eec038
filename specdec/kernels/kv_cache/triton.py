"""Write keys and values into the KV cache's pages on a GPU."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.group import Group

CHUNK = 128
"""Entries of a token that one program moves."""


def append(k_TJD: Tensor, v_TJD: Tensor | None, pages_NPXJD: Tensor, group: Group) -> None:
    """Write the window's keys and values into the rows' blocks, behind what they have committed."""
    tokens, heads, dim = k_TJD.shape
    given = (k_TJD,) if v_TJD is None else (k_TJD, v_TJD)
    assert all(x_TJD.stride()[1:] == (dim, 1) for x_TJD in given)
    _append[(tokens, len(given))](
        *(k_TJD, v_TJD, pages_NPXJD),
        *(group.table_BN, group.length_B, group.width, group.table_BN.stride(0)),
        *(block_stride(pages_NPXJD), k_TJD.stride(0), given[-1].stride(0)),
        SIZE=heads * dim,
        PAGE=pages_NPXJD.shape[2],
        BLOCK=triton.next_power_of_2(heads * dim),
        num_warps=1 if heads * dim <= 512 else 4,
    )


def move(pages_NPXJD: Tensor, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
    """Copy each row's keys and values to other positions, in place; all are read before any is written.

    An accepted path of a tree lies scattered behind what was committed before it, and must follow on it. A
    row with fewer moves than others is padded with a position that moves onto itself, such as its root's.
    """
    rows, moves = from_BP.shape
    _, parts, page, heads, dim = pages_NPXJD.shape
    if not moves:
        return
    _move[(rows, parts, triton.cdiv(heads * dim, CHUNK))](
        *(pages_NPXJD, table_BN, from_BP.contiguous(), to_BP.contiguous()),
        *(table_BN.stride(0), block_stride(pages_NPXJD), moves),
        **{"SIZE": heads * dim, "PAGE": page, "MOVES": triton.next_power_of_2(moves), "CHUNK": CHUNK},
    )


def block_stride(pages_NPXJD: Tensor) -> int:
    """Return how far blocks lie apart, in sixteens of entries: so a kernel knows how they are aligned."""
    _, _, page, heads, dim = pages_NPXJD.shape
    assert pages_NPXJD.stride()[1:] == (page * heads * dim, heads * dim, dim, 1)
    assert pages_NPXJD.stride(0) % 16 == 0
    return pages_NPXJD.stride(0) // 16


@triton.jit
def locate(table, length, row, node, tables, block_stride, SIZE: tl.constexpr, PAGE: tl.constexpr):
    """Return where a window's token has its key in the pages; its value lies PAGE * SIZE entries behind."""
    position = tl.load(length + row) + node
    block = tl.load(table + row * tables + position // PAGE)
    return block * (block_stride.to(tl.int64) * 16) + position % PAGE * SIZE


@triton.jit
def quantise(value, kind: tl.constexpr):
    """Round to what the pages hold; 8 bits end at 448, and what is no number stays none."""
    if kind == tl.float8e4nv:
        value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return value.to(kind)


@triton.jit(do_not_specialize=["width", "tables", "block_stride"], do_not_specialize_on_alignment=["length"])
def _append(
    k, v, pages, table, length, width, tables, block_stride, k_by_token, v_by_token,
    SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    place = locate(table, length, token // width, token % width, tables, block_stride, SIZE, PAGE)
    if part == 0:
        value = tl.load(k + token * k_by_token + at, mask=at < SIZE)
    else:
        value = tl.load(v + token * v_by_token + at, mask=at < SIZE)
    value = quantise(value.to(tl.float32), pages.dtype.element_ty)
    tl.store(pages + place + part * PAGE * SIZE + at, value, mask=at < SIZE)


@triton.jit(do_not_specialize=["tables", "block_stride", "moves"])
def _move(
    pages, table, source, target, tables, block_stride, moves,
    SIZE: tl.constexpr, PAGE: tl.constexpr, MOVES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    move = tl.arange(0, MOVES)
    entry = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    held = move < moves
    mask = held[:, None] & (entry < SIZE)[None, :]
    apart = block_stride.to(tl.int64) * 16
    source = tl.load(source + row * moves + move, mask=held, other=0)
    target = tl.load(target + row * moves + move, mask=held, other=0)
    table += row * tables
    pages += part * PAGE * SIZE
    source = tl.load(table + source // PAGE, mask=held, other=0) * apart + source % PAGE * SIZE
    target = tl.load(table + target // PAGE, mask=held, other=0) * apart + target % PAGE * SIZE
    value = tl.load(pages + source[:, None] + entry[None, :], mask=mask)
    # Other threads may hold what these are about to overwrite.
    tl.debug_barrier()
    tl.store(pages + target[:, None] + entry[None, :], value, mask=mask)
