"""Write keys and values into the KV cache's pages on a GPU."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.group import Group
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.strides import StrideError, dense, outer_strides

CHUNK = 128
"""Entries of a token that each program moves."""


def append(k_TJD: Tensor, v_TJD: Tensor | None, pages_NPXJD: Tensor, group: Group) -> None:
    tokens, heads, dim = k_TJD.shape
    parts = (k_TJD,) if v_TJD is None else (k_TJD, v_TJD)
    (k_by_token,), (v_by_token,) = (outer_strides(x_TJD, 2) for x_TJD in (parts[0], parts[-1]))
    _append[(tokens, len(parts))](
        *(k_TJD, v_TJD, pages_NPXJD),
        *(group.table_BN, dense(group.length_B), group.width, *outer_strides(group.table_BN, 1)),
        **page_strides(pages_NPXJD),
        k_by_token=k_by_token,
        v_by_token=v_by_token,
        SIZE=heads * dim,
        D=dim,
        PAGE=pages_NPXJD.shape[2],
        BLOCK=triton.next_power_of_2(heads * dim),
        num_warps=1 if heads * dim <= 512 else 4,
    )


def move(pages_NPXJD: Tensor, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
    rows, moves = from_BP.shape
    _, parts, page, heads, dim = pages_NPXJD.shape
    if not moves:
        return
    _move[(rows, parts, triton.cdiv(heads * dim, CHUNK))](
        *(pages_NPXJD, table_BN, from_BP.contiguous(), to_BP.contiguous()),
        *outer_strides(table_BN, 1),
        **page_strides(pages_NPXJD),
        moves=moves,
        **{"SIZE": heads * dim, "D": dim, "PAGE": page, "CHUNK": CHUNK},
        MOVES=triton.next_power_of_2(moves),
    )


def page_strides(pages_NPXJD: Tensor) -> dict[str, int]:
    """Return the strides of blocks, parts, tokens and heads as kernel arguments.

    The block stride is in units of 16 entries, which gives the kernel its alignment.
    """
    by_block, by_part, by_token, by_head = outer_strides(pages_NPXJD, 1)
    if by_block % 16:
        raise StrideError(f"blocks lie {by_block} entries apart; the kernels take multiples of 16")
    return {
        "block_stride": by_block // 16,
        "BY_PART": by_part,
        "BY_POSITION": by_token,
        "BY_HEAD": by_head,
    }


@triton.jit
def locate(table, length, row, node, tables, block_stride, BY_POSITION: tl.constexpr, PAGE: tl.constexpr):
    """Return the offset in the pages of the first head's key for a token of a window."""
    position = tl.load(length + row) + node
    block = tl.load(table + row * tables + position // PAGE)
    return block * (block_stride.to(tl.int64) * 16) + position % PAGE * BY_POSITION


@triton.jit
def quantise(value, kind: tl.constexpr):
    """Round to the pages' dtype; FP8 saturates at 448, and NaN stays NaN."""
    if kind == tl.float8e4nv:
        value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return value.to(kind)


@kernel(do_not_specialize=["width", "tables", "block_stride"], do_not_specialize_on_alignment=["length"])
def _append(
    k, v, pages, table, length, width, tables, block_stride, k_by_token, v_by_token,
    BY_PART: tl.constexpr, BY_POSITION: tl.constexpr, BY_HEAD: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    offset = locate(table, length, token // width, token % width, tables, block_stride, BY_POSITION, PAGE)
    if part == 0:
        value = tl.load(k + token * k_by_token + at, mask=at < SIZE)
    else:
        value = tl.load(v + token * v_by_token + at, mask=at < SIZE)
    value = quantise(value.to(tl.float32), pages.dtype.element_ty)
    offset += part * BY_PART + at // D * BY_HEAD + at % D
    tl.store(pages + offset, value, mask=at < SIZE)


@kernel(do_not_specialize=["tables", "block_stride", "moves"])
def _move(
    pages, table, source, target, tables, block_stride, moves,
    BY_PART: tl.constexpr, BY_POSITION: tl.constexpr, BY_HEAD: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, MOVES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    overlap()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    move = tl.arange(0, MOVES)
    entry = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    in_moves = move < moves
    mask = in_moves[:, None] & (entry < SIZE)[None, :]
    by_block = block_stride.to(tl.int64) * 16
    source = tl.load(source + row * moves + move, mask=in_moves, other=0)
    target = tl.load(target + row * moves + move, mask=in_moves, other=0)
    table += row * tables
    entry_at = part * BY_PART + entry // D * BY_HEAD + entry % D
    source = tl.load(table + source // PAGE, mask=in_moves, other=0) * by_block + source % PAGE * BY_POSITION
    target = tl.load(table + target // PAGE, mask=in_moves, other=0) * by_block + target % PAGE * BY_POSITION
    value = tl.load(pages + source[:, None] + entry_at[None, :], mask=mask)
    # All threads must have loaded before any of them overwrites.
    tl.debug_barrier()
    tl.store(pages + target[:, None] + entry_at[None, :], value, mask=mask)
