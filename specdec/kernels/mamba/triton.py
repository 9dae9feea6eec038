"""Mamba-2 between its projections: one kernel for the inputs, the recurrence, then skip and norm."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.conv.triton import (
    SPAN,
    TOKENS,
    arena,
    convolve,
    convolve_path,
    finish,
    move_window,
    path_conv,
    store_inputs,
)
from specdec.kernels.gates.triton import step_size
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.mamba.layer import MambaLayer
from specdec.kernels.pending.triton import inside
from specdec.kernels.recurrence.triton import scan_window
from specdec.kernels.strides import outer_strides

CHANNELS = 64
"""Channels of a tile: half of the convolution's, since the step sizes and values need registers too."""


def mamba(projected_TN: Tensor, layer: MambaLayer, memory: RecurrentMemory, group: Group) -> Tensor:
    """Run everything between the projections; mutates `memory` as the convolution and the recurrence do."""
    inner, channels, heads = layer.widths
    tokens, taps = len(projected_TN), layer.conv_CK.shape[1]
    dtype, device = projected_TN.dtype, projected_TN.device
    q_TGK, k_TGK = torch.empty(2, tokens, layer.groups, layer.state_dim, dtype=torch.float32, device=device)
    v_THW = torch.empty(tokens, heads, layer.head_dim, dtype=torch.float32, device=device)
    decay_TH = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    skip_TN = torch.empty(tokens, inner, dtype=dtype, device=device)
    k_path_BPGK = None
    if group.path is not None:
        shape = (*group.path.slab_BN.shape, layer.groups, layer.state_dim)
        k_path_BPGK = torch.empty(shape, dtype=dtype, device=device)
    xbc_TC = projected_TN[:, inner : inner + channels]
    blocks = triton.cdiv(group.width, SPAN)
    tiles = triton.cdiv(inner, CHANNELS) + 2 * triton.cdiv(layer.shared, CHANNELS)
    low, high = layer.step_limit
    _inputs[(tiles, group.rows, blocks)](
        *(xbc_TC, *outer_strides(projected_TN, 1), layer.conv_CK.t().contiguous(), layer.conv_C),
        *(layer.A_H, layer.dt_bias_H, low, high),
        *(q_TGK, k_TGK, v_THW, decay_TH, skip_TN, k_path_BPGK),
        **arena(memory, group),
        M=group.width,
        H=heads,
        W=layer.head_dim,
        SHARED=layer.shared,
        TAPS=taps,
        LIMITED=low > 0 or high != math.inf,
        MOVES=blocks == 1,
        SPAN=SPAN,
        BLOCK=CHANNELS,
        BM=TOKENS,
        num_warps=4,
    )
    if blocks > 1:
        store_inputs(xbc_TC, memory, group)
    o_THW = scan_window(q_TGK, k_TGK, v_THW, decay_TH, None, memory, group, k_path_BPGK)
    out_TN = torch.empty(tokens, inner, dtype=dtype, device=device)
    size = inner // layer.groups
    block = triton.next_power_of_2(size)
    _skip_and_norm[(tokens * layer.groups,)](
        *(
            o_THW,
            skip_TN,
            layer.D_H,
            projected_TN,
            *outer_strides(projected_TN, 1),
            layer.norm_N,
            out_TN,
            layer.eps,
        ),
        GATE_FIRST=layer.gate_first,
        RUNS=layer.groups,
        SIZE=size,
        W=layer.head_dim,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out_TN


def mamba_keys(
    layer: MambaLayer, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor
) -> Tensor:
    """Recompute the keys of the pending paths from the inputs in their records."""
    channels = slice(layer.inner, layer.inner + layer.shared)
    k_BPN = path_conv(layer.conv_CK, layer.conv_C, channels, memory, slot_B, path, length_B)
    return k_BPN.view(*path.slab_BN.shape, layer.groups, layer.state_dim)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@kernel(do_not_specialize=["P", "M"])
def _inputs(
    x, x_by_token, weight, bias, A, dt_bias, low, high, q, k, v, decay, skip, keys, window, window_by_slot,
    slots, record, by_slab, by_index, path_slab, path_index, path_length, P, record_slab, record_index,
    snapshots, taps, M, H: tl.constexpr, W: tl.constexpr, SHARED: tl.constexpr,
    TAPS: tl.constexpr, LIMITED: tl.constexpr, MOVES: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of x, B or C; tiles of x also compute steps, values and decays."""
    overlap()
    INNER: tl.constexpr = H * W
    C: tl.constexpr = INNER + 2 * SHARED
    tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_x: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    of_b: tl.constexpr = (SHARED + BLOCK - 1) // BLOCK
    w, shared = tl.arange(0, BLOCK), k
    if tile < of_x:
        begin, first = 0, tile * BLOCK
        in_c = inside(w, first, INNER, BLOCK)
    elif tile < of_x + of_b:
        begin, first = INNER, (tile - of_x) * BLOCK
        in_c = inside(w, first, SHARED, BLOCK)
    else:
        begin, first, shared = INNER + SHARED, (tile - of_x - of_b) * BLOCK, q
        in_c = inside(w, first, SHARED, BLOCK)
    at = first + w
    c = begin + at
    slot, token = tl.load(slots + b), b * M
    row_window = window + slot * window_by_slot
    x += token * x_by_token
    length = b * 0
    if path_slab is not None:
        length = tl.load(path_length + b)
        path_slab += b * P
        path_index += b * P
    row_taps, row_snapshots = taps, snapshots
    if taps is not None:
        row_taps += token * TAPS
    if snapshots is not None:
        row_snapshots += token
    until = min(tl.program_id(2) * SPAN + SPAN, M)
    for start in range(tl.program_id(2) * SPAN, until, BM):
        m = start + tl.arange(0, BM)
        in_m = m < M
        total = convolve(m, in_m, length, length, x, x_by_token, window, row_window, window_by_slot, record,
                         by_slab, by_index, path_slab, path_index, row_snapshots, row_taps, weight, bias, c,
                         in_c & (slot != 0), C, TAPS, BM, BLOCK)  # fmt: skip
        mask = in_m[:, None] & in_c[None, :]
        y = finish(total, x.dtype.element_ty)
        if tile < of_x:
            h = at // W
            dt = tl.load(x + m.to(tl.int64)[:, None] * x_by_token + C + h[None, :], mask=mask, other=0.0)
            step = step_size(dt, tl.load(dt_bias + h, mask=in_c, other=0.0)[None, :], low, high, LIMITED)
            to = (token + m)[:, None] * INNER + at[None, :]
            tl.store(v + to, step * y.to(tl.float32), mask=mask)
            tl.store(skip + to, y, mask=mask)
            rate = tl.load(A + h, mask=in_c, other=0.0)[None, :]
            first_head = mask & (at == h * W)[None, :]
            tl.store(decay + (token + m)[:, None] * H + h[None, :], step * rate, mask=first_head)
        else:
            tl.store(shared + (token + m)[:, None] * SHARED + at[None, :], y.to(tl.float32), mask=mask)
    if path_slab is not None:  # Before the path enters the window.
        of_keys = tile >= of_x and tile < of_x + of_b
        if of_keys and tl.program_id(2) == 0:
            convolve_path(keys + b * P * SHARED, row_window, record, by_slab, by_index, path_slab, path_index,
                          length, weight, bias, INNER, at, in_c, SHARED, C, TAPS, BM, BLOCK)  # fmt: skip
    if MOVES:
        move_window(b, slot, x, x_by_token, window, window_by_slot, record, by_slab, by_index, path_slab,
                    path_index, length, record_slab, record_index, snapshots, M,
                    c, in_c, TAPS, BM)  # fmt: skip


@kernel
def _skip_and_norm(
    o, x, D, gate, gate_by_token, weight, out, eps, GATE_FIRST: tl.constexpr, RUNS: tl.constexpr,
    SIZE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add D x to the recurrence's output, gate with silu, and normalise one run before or after the gate."""
    overlap()
    program = tl.program_id(0).to(tl.int64)
    token, run = program // RUNS, program % RUNS
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    entry = run * SIZE + at
    value = tl.load(o + program * SIZE + at, mask=mask, other=0.0)
    x_at = tl.load(x + program * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_by_token + entry, mask=mask, other=0.0).to(tl.float32)
    silu = z / (1.0 + tl.exp(-z))
    value += tl.load(D + entry // W, mask=mask, other=0.0) * x_at
    if GATE_FIRST:
        value *= silu
    if weight is not None:
        value *= 1.0 / tl.sqrt(tl.sum(value * value) / SIZE + eps)
        value *= tl.load(weight + entry, mask=mask, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        value *= silu
    tl.store(out + program * SIZE + at, value.to(out.dtype.element_ty), mask=mask)
