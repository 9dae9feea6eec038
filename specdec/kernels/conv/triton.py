"""The causal convolution along tree paths: a program has some channels of one row, and tokens in tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.strides import dense, outer_strides, window_stride

CHANNELS, TOKENS = 128, 8
"""Tile sizes."""
SPAN = 64
"""Tokens per program. A wider window takes several programs and a second launch that replaces the old inputs,
once all programs have read them."""


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    memory: RecurrentMemory,
    group: Group,
    *,
    silu: bool = True,
) -> Tensor:
    """Convolve as the reference does. The padding row's slot 0 is unchanged, and its outputs are zero."""
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    blocks, (channels, taps) = triton.cdiv(group.width, SPAN), weight_CK.shape
    _causal_conv[(triton.cdiv(channels, CHANNELS), group.rows, blocks)](
        *(x_TC, *outer_strides(x_TC, 1), weight_CK.t().contiguous(), bias_C, out_TC),
        **arena(memory, group),
        M=group.width,
        C=channels,
        TAPS=taps,
        SILU=silu,
        MOVES=blocks == 1,
        SPAN=SPAN,
        **_TILE,
    )
    if blocks > 1:
        store_inputs(x_TC, memory, group)
    return out_TC


def path_conv(
    weight_CK: Tensor,
    bias_C: Tensor | None,
    channels: slice,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
) -> Tensor:
    record, (rows, longest) = memory.input_SRC, path.slab_BN.shape
    first, end, _ = channels.indices(len(weight_CK))
    out_BPC = torch.empty(rows, longest, end - first, dtype=record.dtype, device=record.device)
    _path_conv[(triton.cdiv(end - first, CHANNELS), rows)](
        *(weight_CK.t().contiguous(), bias_C, out_BPC),
        *inputs_of(memory, slot_B),
        *(*record_ids(path), dense(length_B), longest, first),
        WIDTH=end - first,
        C=len(weight_CK),
        TAPS=weight_CK.shape[1],
        **_TILE,
    )
    return out_BPC


def store_inputs(x_TC: Tensor, memory: RecurrentMemory, group: Group) -> None:
    """Write a window's inputs to windows and records, after its outputs have been computed."""
    _, inputs, channels = memory.window_SIC.shape
    _move[(triton.cdiv(channels, CHANNELS), group.rows)](
        *(x_TC, *outer_strides(x_TC, 1)),
        **{name: value for name, value in arena(memory, group).items() if name != "taps"},
        M=group.width,
        C=channels,
        TAPS=inputs + 1,
        **_TILE,
    )


def fold_window(memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
    rows, (_, inputs, channels) = len(slot_B), memory.window_SIC.shape
    _move[(triton.cdiv(channels, CHANNELS), rows)](
        *(None, 0, *inputs_of(memory, slot_B)),
        *(*record_ids(path), dense(length_B), path.slab_BN.shape[1]),
        *(None, None, None),
        M=0,
        C=channels,
        TAPS=inputs + 1,
        **_TILE,
    )


_TILE = {"BLOCK": CHANNELS, "BM": TOKENS, "num_warps": 4}


def arena(memory: RecurrentMemory, group: Group) -> dict[str, Tensor | int | None]:
    """Return a group's windows, path, records and taps as kernel arguments."""
    path = group.path
    window, window_by_slot, slots, record, by_slab, by_index = inputs_of(memory, group.state_B)
    path_slab, path_index = record_ids(path)
    record_slab, record_index = record_ids(group.record)
    return {
        "window": window,
        "window_by_slot": window_by_slot,
        "slots": slots,
        "record": record,
        "by_slab": by_slab,
        "by_index": by_index,
        "path_slab": path_slab,
        "path_index": path_index,
        "path_length": dense(group.path_length_B) if path else None,
        "P": path.slab_BN.shape[1] if path else 0,
        "record_slab": record_slab,
        "record_index": record_index,
        "snapshots": dense(group.snapshot_BM),
        "taps": None if group.tap_BMC is None else group.tap_BMC.contiguous(),
    }


def inputs_of(memory: RecurrentMemory, slot_B: Tensor) -> tuple[Tensor, int, Tensor, Tensor, int, int]:
    """Return the windows [C, I], their ids, the recorded inputs and all strides, as kernel arguments."""
    window, record = memory.window_SIC, memory.input_SRC
    by_slab, by_index = outer_strides(record, 1)
    return window, window_stride(window), dense(slot_B), record, by_slab, by_index


def record_ids(records: RecordIds | None) -> tuple[Tensor | None, Tensor | None]:
    """Return slabs and indices, contiguous, or None for both."""
    return (None, None) if records is None else (records.slab_BN.contiguous(), records.index_BN.contiguous())


@triton.jit
def known(
    n, x, x_by_token, window, record, by_slab, by_index, path_slab, path_index, length, c, in_c,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Load inputs n of a row: its window's, oldest first, then its path's, then its tokens'.

    The pointers are None without a path or without tokens.
    """
    # Add three masked loads instead of selecting an address: the loads do not depend on each other.
    at_window = window + n[:, None] + c[None, :] * INPUTS
    value = tl.load(at_window, mask=(n < INPUTS)[:, None] & in_c[None, :], other=0.0)
    if path_slab is not None:
        mask_n = (n >= INPUTS) & (n < INPUTS + length)
        at = tl.load(path_slab + n - INPUTS, mask=mask_n, other=0) * by_slab
        at += tl.load(path_index + n - INPUTS, mask=mask_n, other=0) * by_index
        value += tl.load(record + at[:, None] + c[None, :], mask=mask_n[:, None] & in_c[None, :], other=0.0)
    if x is not None:
        mask_n = n >= INPUTS + length
        at = (n - INPUTS - length).to(tl.int64) * x_by_token
        value += tl.load(x + at[:, None] + c[None, :], mask=mask_n[:, None] & in_c[None, :], other=0.0)
    return value


@triton.jit
def convolve(
    m, in_m, start, length, x, x_by_token, window, row_window, window_by_slot, record, by_slab, by_index,
    path_slab, path_index, snapshots, taps, weight, bias, c, in_c, C: tl.constexpr, TAPS: tl.constexpr,
    BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sums [BM, BLOCK] of nodes m, whose own inputs begin at index `start` + TAPS - 1.

    With snapshots every node stores the window after it: its taps' inputs except the oldest.
    """
    total = tl.zeros((BM, BLOCK), tl.float32)
    for j in tl.static_range(TAPS):
        n = start + m + j
        if taps is not None:
            n = start + tl.load(taps + m * TAPS + j, mask=in_m, other=0)
        value = known(tl.where(in_m, n, 0), x, x_by_token, row_window, record, by_slab, by_index, path_slab,
                    path_index, length, c, in_c, TAPS - 1)  # fmt: skip
        if snapshots is not None and j > 0:
            to = tl.load(snapshots + m, mask=in_m, other=0) * window_by_slot + (j - 1)
            at_snapshot = window + to[:, None] + c[None, :] * (TAPS - 1)
            tl.store(at_snapshot, value, mask=in_m[:, None] & in_c[None, :])
        total += value.to(tl.float32) * tl.load(weight + j * C + c, mask=in_c, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)
    return total


@triton.jit
def finish(total, kind: tl.constexpr, SILU: tl.constexpr = True):
    """Round, then apply silu and round again."""
    if not SILU:
        return total.to(kind)
    y = total.to(kind).to(tl.float32)
    return (y / (1.0 + tl.exp(-y))).to(kind)


@triton.jit
def convolve_path(
    out, window, record, by_slab, by_index, path_slab, path_index, length, weight, bias, start, local_c, in_c,
    WIDTH: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Recompute the convolution of a row's path in WIDTH channels start + own_c."""
    for first in range(0, length, BM):
        m = first + tl.arange(0, BM)
        total = convolve(m, m < length, 0, length, None, 0, None, window, 0, record, by_slab, by_index,
                         path_slab, path_index, None, None, weight, bias, start + local_c, in_c, C, TAPS, BM,
                         BLOCK)  # fmt: skip
        to = out + m[:, None] * WIDTH + local_c[None, :]
        tl.store(to, finish(total, record.dtype.element_ty), mask=(m < length)[:, None] & in_c[None, :])


@triton.jit
def move_window(
    b, slot, x, x_by_token, window, window_by_slot, record, by_slab, by_index, path_slab, path_index, length,
    record_slab, record_index, snapshots, M, c, in_c,
    TAPS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Store row b's inputs for its next window; x and the path's ids are offset to the row."""
    inputs: tl.constexpr = TAPS - 1
    j = tl.arange(0, triton.next_power_of_2(TAPS))
    in_window = (j < inputs)[:, None] & in_c[None, :] & (slot != 0)
    row_window = window + slot * window_by_slot
    end = length
    if record_slab is None:
        end += M
    if snapshots is None and end > 0:
        value = known(tl.where(j < inputs, end + j, 0), x, x_by_token, row_window, record, by_slab, by_index,
                    path_slab, path_index, length, c, in_c, inputs)  # fmt: skip
        tl.debug_barrier()  # All threads must have read window and path before one replaces them.
        tl.store(row_window + j[:, None] + c[None, :] * inputs, value, mask=in_window)
    if record_slab is not None and slot != 0:
        for first in range(0, M, BM):
            m = first + tl.arange(0, BM)
            in_m = m < M
            at = tl.load(record_slab + b * M + m, mask=in_m, other=0) * by_slab
            at += tl.load(record_index + b * M + m, mask=in_m, other=0) * by_index
            mask = in_m[:, None] & in_c[None, :]
            value = tl.load(x + m.to(tl.int64)[:, None] * x_by_token + c[None, :], mask=mask, other=0.0)
            tl.store(record + at[:, None] + c[None, :], value, mask=mask)


@kernel(do_not_specialize=["P", "M"])
def _causal_conv(
    x, x_by_token, weight, bias, out, window, window_by_slot, slots, record, by_slab, by_index, path_slab,
    path_index, path_length, P, record_slab, record_index, snapshots, taps, M,
    C: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, MOVES: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    overlap()
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1).to(tl.int64)
    in_c = c < C
    slot, token = tl.load(slots + b), b * M
    length = tl.program_id(1) * 0  # 32 bits: int64 would spill registers
    if path_slab is not None:
        length = tl.load(path_length + b).to(tl.int32)
        path_slab += b * P
        path_index += b * P
    x += token * x_by_token
    row_taps, row_snapshots = taps, snapshots
    if taps is not None:
        row_taps += token * TAPS
    if snapshots is not None:
        row_snapshots += token
    begin = tl.program_id(2) * SPAN
    for first in range(begin, min(begin + SPAN, M), BM):
        m = first + tl.arange(0, BM)
        in_m = m < M
        total = convolve(m, in_m, length, length, x, x_by_token, window, window + slot * window_by_slot,
                         window_by_slot, record, by_slab, by_index, path_slab, path_index, row_snapshots,
                         row_taps, weight, bias, c, in_c & (slot != 0), C, TAPS, BM, BLOCK)  # fmt: skip
        at = out + (token + m)[:, None] * C + c[None, :]
        tl.store(at, finish(total, out.dtype.element_ty, SILU), mask=in_m[:, None] & in_c[None, :])
    if MOVES:
        move_window(b, slot, x, x_by_token, window, window_by_slot, record, by_slab, by_index, path_slab,
                    path_index, length, record_slab, record_index, snapshots, M,
                    c, in_c, TAPS, BM)  # fmt: skip


@kernel(do_not_specialize=["P", "M"])
def _move(
    x, x_by_token, window, window_by_slot, slots, record, by_slab, by_index, path_slab, path_index,
    path_length, P, record_slab, record_index, snapshots, M, C: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    overlap()
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1).to(tl.int64)
    length = b * 0
    if path_slab is not None:
        length = tl.load(path_length + b)
        path_slab += b * P
        path_index += b * P
    if x is not None:
        x += b * M * x_by_token
    move_window(b, tl.load(slots + b), x, x_by_token, window, window_by_slot, record, by_slab, by_index,
                path_slab, path_index, length, record_slab, record_index, snapshots, M, c, c < C, TAPS,
                BM)  # fmt: skip


@kernel(do_not_specialize=["P"])
def _path_conv(
    weight, bias, out, window, window_by_slot, slots, record, by_slab, by_index, path_slab, path_index,
    path_length, P, start, WIDTH: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    overlap()
    local_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1).to(tl.int64)
    window += tl.load(slots + b) * window_by_slot
    convolve_path(out + b * P * WIDTH, window, record, by_slab, by_index, path_slab + b * P,
                  path_index + b * P, tl.load(path_length + b), weight, bias, start, local_c, local_c < WIDTH,
                  WIDTH, C, TAPS, BM, BLOCK)  # fmt: skip
