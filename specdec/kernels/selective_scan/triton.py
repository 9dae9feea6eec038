"""Mamba-1's recurrence over a window, some channels per program; a chain's state stays on chip.

A node whose parent is not the previous node loads its parent's state from memory: from the parent's snapshot,
or from scratch memory of this window, written for parents of such nodes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.conv.triton import fold_window, record_ids
from specdec.kernels.gates.triton import softplus
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.pending.triton import inside, path_arguments
from specdec.kernels.selective_scan.layer import SelectiveLayer
from specdec.kernels.strides import dense, outer_strides

COLUMNS = 64
"""State columns per program: with 16 keys, 32 numbers per lane."""


def selective_scan(
    x_THW: Tensor,
    gate_THW: Tensor,
    dt_THW: Tensor,
    k_THK: Tensor,
    q_THK: Tensor,
    layer: SelectiveLayer,
    memory: RecurrentMemory,
    group: Group,
    x_path_BPHW: Tensor | None,
) -> Tensor:
    """Scan as the reference does. The padding row's slot 0 is unchanged, and its outputs are zero."""
    assert group.tentative or group.ancestors_BMM is None, "certain tokens form a chain"
    state, (heads, columns), size = memory.state_SHKW, x_THW.shape[1:], k_THK.shape[2]
    x_THW, gate_THW, dt_THW = (
        x if x.stride()[1:] == (columns, 1) else x.contiguous() for x in (x_THW, gate_THW, dt_THW)
    )
    out_THW = torch.empty(x_THW.shape, dtype=x_THW.dtype, device=x_THW.device)
    above = scratch = None
    if group.ancestors_BMM is not None:
        above = group.ancestors_BMM.contiguous().view(torch.uint8)
        if group.snapshot_BM is None:
            scratch = state.new_empty(group.rows * group.width, heads, size, columns)
    _window[(triton.cdiv(columns, COLUMNS), heads, group.rows)](
        *(x_THW, x_THW.stride(0), gate_THW, gate_THW.stride(0), dt_THW, dt_THW.stride(0)),
        *(k_THK.contiguous(), q_THK.contiguous(), layer.A_HKW, layer.D_HW, layer.dt_bias_HW, out_THW),
        *(state, *outer_strides(state, 3), dense(group.state_B)),
        **path_arguments(memory, group.path, group.path_length_B, x_path_BPHW),
        **dict(zip(("record_slab", "record_index"), record_ids(group.record), strict=True)),
        snapshots=dense(group.snapshot_BM),
        above=above,
        scratch=scratch,
        M=group.width,
        H=heads,
        K=size,
        W=columns,
        BK=triton.next_power_of_2(size),
        BW=COLUMNS,
        num_warps=1,
    )
    return out_THW


def fold_selective(
    layer: SelectiveLayer,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
    x_path_BPHW: Tensor,
) -> None:
    fold_window(memory, slot_B, path, length_B)
    state = memory.state_SHKW
    _, heads, size, columns = state.shape
    _fold[(triton.cdiv(columns, COLUMNS), heads, len(slot_B))](
        *(layer.A_HKW, state, *outer_strides(state, 3), dense(slot_B)),
        **path_arguments(memory, path, length_B, x_path_BPHW),
        H=heads,
        K=size,
        W=columns,
        BK=triton.next_power_of_2(size),
        BW=COLUMNS,
        num_warps=1,
    )


@triton.jit
def _along_path(
    s, rate, inputs, path_slab, path_index, length, steps, step_by_slab, step_by_index, keys, key_by_slab,
    key_by_index, i, w, in_k, in_w, HW: tl.constexpr,
):  # fmt: skip
    """Return a block of a state after its row's path; pointers are offset to the head and block."""
    for n in range(0, length):
        slab, index = tl.load(path_slab + n), tl.load(path_index + n)
        step = tl.load(steps + slab * step_by_slab + index * step_by_index + w, mask=in_w, other=0.0)
        k = tl.load(keys + slab * key_by_slab + index * key_by_index + i, mask=in_k, other=0.0)
        x = tl.load(inputs + n * HW + w, mask=in_w, other=0.0).to(tl.float32)
        s = s * tl.exp(rate * step[None, :]) + k[:, None] * (step * x)[None, :]
    return s


@kernel(do_not_specialize=["P", "M"])
def _window(
    x, x_by_token, gate, gate_by_token, dt, dt_by_token, k, q, A, D, bias, out, state, state_by_slot, slots,
    keys, path_slab, path_index, path_length, P, update, update_by_slab, update_by_index,
    decays, decay_by_slab, decay_by_index, record_slab, record_index, snapshots, above, scratch, M,
    H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    overlap()
    first, h, b = tl.program_id(0) * BW, tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, w = tl.arange(0, BK), tl.arange(0, BW)
    in_k, in_w = i < K, inside(w, first, W, BW)
    in_state, at_c = in_k[:, None] & in_w[None, :], h * W + first
    within = h * K * W + first + i[:, None] * W + w[None, :]
    slot = tl.load(slots + b)
    out += b * M * H * W + at_c + w
    if slot == 0:
        for m in range(M):
            tl.store(out + m * H * W, tl.zeros((BW,), out.dtype.element_ty), mask=in_w)
        return
    row_state = state + slot * state_by_slot + within
    s = tl.load(row_state, mask=in_state, other=0.0)
    rate = tl.load(A + within, mask=in_state, other=0.0)
    skip = tl.load(D + at_c + w, mask=in_w, other=0.0)
    offset = tl.load(bias + at_c + w, mask=in_w, other=0.0)
    update += at_c
    decays += h * K
    if path_slab is not None:
        length = tl.load(path_length + b)
        s = _along_path(s, rate, keys + b * P * H * W + at_c, path_slab + b * P, path_index + b * P, length,
                        update, update_by_slab, update_by_index, decays, decay_by_slab, decay_by_index, i, w,
                        in_k, in_w, H * W)  # fmt: skip
        if record_slab is not None and length > 0:
            tl.store(row_state, s, mask=in_state)
    if above is not None:
        root = s
    for m in range(M):
        token = b * M + m
        if above is not None:
            parent = m * 0 - 1
            for j in range(m):  # Topological order: the parent is the last ancestor.
                parent = tl.where(tl.load(above + token * M + j) != 0, j, parent)
            if parent < 0:
                s = root
            elif parent < m - 1:
                tl.debug_barrier()  # The parent's state was stored by all threads.
                if snapshots is not None:
                    source = tl.load(snapshots + b * M + parent)
                    s = tl.load(state + source * state_by_slot + within, mask=in_state, other=0.0)
                else:
                    source = (b * M + parent) * (H * K * W)
                    s = tl.load(scratch + source + within, mask=in_state, other=0.0)
        x_m = tl.load(x + token * x_by_token + at_c + w, mask=in_w, other=0.0).to(tl.float32)
        z = tl.load(gate + token * gate_by_token + at_c + w, mask=in_w, other=0.0).to(tl.float32)
        raw = tl.load(dt + token * dt_by_token + at_c + w, mask=in_w, other=0.0).to(tl.float32)
        k_m = tl.load(k + (token * H + h) * K + i, mask=in_k, other=0.0).to(tl.float32)
        q_m = tl.load(q + (token * H + h) * K + i, mask=in_k, other=0.0).to(tl.float32)
        step = softplus(raw + offset)
        s = s * tl.exp(rate * step[None, :]) + k_m[:, None] * (step * x_m)[None, :]
        o = tl.sum(q_m[:, None] * s, 0) + skip * x_m
        tl.store(out + m * H * W, (o * (z / (1.0 + tl.exp(-z)))).to(out.dtype.element_ty), mask=in_w)
        if snapshots is not None:
            tl.store(state + tl.load(snapshots + token) * state_by_slot + within, s, mask=in_state)
        elif above is not None:
            tl.store(scratch + token * (H * K * W) + within, s, mask=in_state)
        if record_slab is not None:
            slab, index = tl.load(record_slab + token), tl.load(record_index + token)
            tl.store(update + slab * update_by_slab + index * update_by_index + w, step, mask=in_w)
            if first == 0:
                tl.store(decays + slab * decay_by_slab + index * decay_by_index + i, k_m, mask=in_k)
    if record_slab is None and snapshots is None:
        tl.store(row_state, s, mask=in_state)


@kernel(do_not_specialize=["P"])
def _fold(
    A, state, state_by_slot, slots, keys, path_slab, path_index, path_length, P, update, update_by_slab,
    update_by_index, decays, decay_by_slab, decay_by_index, H: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    overlap()
    first, h, b = tl.program_id(0) * BW, tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, w = tl.arange(0, BK), tl.arange(0, BW)
    in_k, in_w = i < K, inside(w, first, W, BW)
    slot = tl.load(slots + b)
    length = tl.load(path_length + b)
    if slot != 0 and length > 0:
        at_c, in_state = h * W + first, in_k[:, None] & in_w[None, :]
        within = h * K * W + first + i[:, None] * W + w[None, :]
        at = state + slot * state_by_slot + within
        s = tl.load(at, mask=in_state, other=0.0)
        rate = tl.load(A + within, mask=in_state, other=0.0)
        s = _along_path(s, rate, keys + b * P * H * W + at_c, path_slab + b * P, path_index + b * P, length,
                        update + at_c, update_by_slab, update_by_index, decays + h * K, decay_by_slab,
                        decay_by_index, i, w, in_k, in_w, H * W)  # fmt: skip
        tl.store(at, s, mask=in_state)
