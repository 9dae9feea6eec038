"""The recurrence over a narrow window in one kernel, including the fold of the pending path.

Each program has one head of one row and some columns of its state, loaded once; every node reads it with
float32 sums. Wider windows go to the chunked scan.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.chunk_scan.triton import chunk_scan
from specdec.kernels.conv.triton import fold_window, record_ids
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.pending.triton import fold_path, fold_state, inside, path_arguments
from specdec.kernels.strides import dense, outer_strides

WALK, CERTAIN = 8, 4
"""Widest windows of the single kernel: of tokens that leave records, and of certain tokens."""
SLICE = tl.constexpr(32)
"""Entries of keys and queries per partial sum: few lanes share a sum."""
COLUMNS = 16
"""State columns per program: one warp, which sums without waiting for another."""


def scan_window(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THW: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor | None,
    memory: RecurrentMemory,
    group: Group,
    k_path_BPGK: Tensor | None,
) -> Tensor:
    """Scan as the reference does. The padding row's slot 0 is unchanged, and its outputs are zero."""
    assert group.tentative or group.ancestors_BMM is None, "certain tokens form a chain"
    state = memory.state_SHKW
    q_TGK, k_TGK, v_THW = _dense(q_TGK), _dense(k_TGK), _dense(v_THW)
    decay_TH, beta_TH = decay_TH.contiguous(), None if beta_TH is None else beta_TH.contiguous()
    max_width = CERTAIN if group.record is None else WALK
    if group.snapshot_BM is None and group.width > max_width:
        return chunk_scan(q_TGK, k_TGK, v_THW, decay_TH, beta_TH, memory, group, k_path_BPGK)
    (groups, size), (heads, columns) = k_TGK.shape[1:], v_THW.shape[1:]
    out_THW = torch.empty(v_THW.shape, dtype=q_TGK.dtype, device=q_TGK.device)
    ancestors = None if group.ancestors_BMM is None else group.ancestors_BMM.contiguous().view(torch.uint8)
    inputs = (
        *(q_TGK, q_TGK.stride(0), k_TGK, k_TGK.stride(0), v_THW, v_THW.stride(0)),
        *(decay_TH, beta_TH, out_THW, state, *outer_strides(state, 3), dense(group.state_B)),
    )
    by_key = decay_TH.dim() == 3
    # Halve the columns if other values fill the registers: 16 would spill.
    is_full = (
        by_key
        or (v_THW.itemsize > 2 and beta_TH is not None)
        or (group.width > CERTAIN and group.path is None)
    )
    block = COLUMNS // 2 if is_full else COLUMNS
    grid = (triton.cdiv(columns, block), heads, group.rows)
    sizes = {"G": groups, "H": heads, "K": size, "W": columns}
    sizes |= {"BK": triton.next_power_of_2(size), "BW": block, "BY_KEY": by_key}
    if group.snapshot_BM is not None:
        _snapshots[grid](*inputs, dense(group.snapshot_BM), ancestors, group.width, **sizes, num_warps=1)
        return out_THW
    _window[grid](
        *inputs,
        **path_arguments(memory, group.path, group.path_length_B, k_path_BPGK),
        **dict(zip(("record_slab", "record_index"), record_ids(group.record), strict=True)),
        ancestors=ancestors,
        M=group.width,
        BM=triton.next_power_of_2(group.width),
        **sizes,
        num_warps=4 if by_key else 1,
    )
    return out_THW


def fold(
    memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor, k_path_BPGK: Tensor | None
) -> None:
    fold_window(memory, slot_B, path, length_B)
    if k_path_BPGK is not None:
        fold_state(memory, slot_B, path, length_B, k_path_BPGK)


def _dense(x_TGK: Tensor) -> Tensor:
    """Return x with each token's heads contiguous; tokens may be strided, like columns of a projection."""
    return x_TGK if x_TGK.stride()[1:] == (x_TGK.shape[2], 1) else x_TGK.contiguous()


@kernel(do_not_specialize=["P"])
def _window(
    q, q_by_token, k, k_by_token, v, v_by_token, decay, beta, out, state, state_by_slot, slots,
    keys, path_slab, path_index, path_length, P, update, update_by_slab, update_by_index,
    decays, decay_by_slab, decay_by_index, record_slab, record_index, ancestors, M,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
    BY_KEY: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    overlap()
    first, h, b = tl.program_id(0) * BW, tl.program_id(1), tl.program_id(2).to(tl.int64)
    g = h // (H // G)
    i, w, m = tl.arange(0, BK), tl.arange(0, BW), tl.arange(0, BM)
    in_k, in_w, in_m = i < K, inside(w, first, W, BW), m < M
    mask = in_m[:, None] & in_w[None, :]
    out += b * M * H * W + h * W + first
    at_out = out + m[:, None] * (H * W) + w[None, :]
    slot = tl.load(slots + b)
    if slot == 0:
        tl.store(at_out, tl.zeros((BM, BW), out.dtype.element_ty), mask=mask)
        return
    # Load the state early: the following computation does not need it yet.
    in_state = in_k[:, None] & in_w[None, :]
    row_state = state + slot * state_by_slot + h * K * W + first + i[:, None] * W + w[None, :]
    s = tl.load(row_state, mask=in_state, other=0.0)
    # Sum the decays between two nodes from their own tokens: sums from the root would lose digits.
    if BY_KEY:
        decay += b * M * H * K + h * K
        in_mk = in_m[:, None] & in_k[None, :]
        log_a = tl.load(decay + m[:, None] * (H * K) + i[None, :], mask=in_mk, other=0.0).to(tl.float32)
    else:
        log_a = tl.load(decay + b * M * H + h + m * H, mask=in_m, other=0.0).to(tl.float32)
    if ancestors is None:
        visible = (m[:, None] >= m[None, :]) & in_m[:, None]
    else:
        square = in_m[:, None] & in_m[None, :]
        visible = tl.load(ancestors + b * M * M + m[:, None] * M + m[None, :], mask=square, other=0) != 0
    below = visible & (m[:, None] > m[None, :])
    if not BY_KEY:
        total = tl.sum(tl.where(visible, log_a[None, :], 0.0), 1)
        step = visible[:, :, None] & below[None, :, :]
        between = tl.exp(tl.sum(tl.where(step, log_a[None, :, None], 0.0), 1))
        between = tl.where(visible, between, 0.0)

    q += b * M * q_by_token + g * K
    k += b * M * k_by_token + g * K
    inner = tl.zeros((BM, BM), tl.float32)
    weight = tl.zeros((BM, BM), tl.float32)
    for start in range(0, K, SLICE):
        at = start + tl.arange(0, SLICE)
        in_at = in_m[:, None] & (at < K)[None, :]
        k_m = tl.load(k + m[:, None] * k_by_token + at[None, :], mask=in_at, other=0.0).to(tl.float32)
        q_m = tl.load(q + m[:, None] * q_by_token + at[None, :], mask=in_at, other=0.0).to(tl.float32)
        if BY_KEY:
            g_m = tl.load(decay + m[:, None] * (H * K) + at[None, :], mask=in_at, other=0.0).to(tl.float32)
        for n in tl.static_range(BM):
            valid = (m == n)[None, :]
            k_n = tl.load(k + n * k_by_token + at, mask=(at < K) & (n < M), other=0.0).to(tl.float32)
            if BY_KEY:  # decay n's key to the nodes below it
                strict_below = tl.sum(tl.where(valid & below, 1, 0), 1) != 0
                step = visible & strict_below[None, :]
                k_n = k_n[None, :] * tl.exp(tl.sum(tl.where(step[:, :, None], g_m[None, :, :], 0.0), 1))
            else:
                k_n = k_n[None, :]
            weight += tl.where(valid, tl.sum(q_m * k_n, 1)[:, None], 0.0)
            if beta is not None:
                inner += tl.where(valid, tl.sum(k_m * k_n, 1)[:, None], 0.0)

    update += h * W + first
    decays += h * (K if BY_KEY else 1)
    if path_slab is not None:
        length = tl.load(path_length + b)
        s = fold_path(s, keys + (b * P * G + g) * K, path_slab + b * P, path_index + b * P, length, update,
                      update_by_slab, update_by_index, decays, decay_by_slab, decay_by_index, i, w, in_k,
                      in_w, G * K, BY_KEY)  # fmt: skip
        if record_slab is not None and length > 0:
            tl.store(row_state, s, mask=in_state)

    read = tl.zeros((BM, BW), tl.float32)
    o = tl.zeros((BM, BW), tl.float32)
    for n in tl.static_range(BM):
        selected = (m == n)[:, None]
        q_n = tl.load(q + n * q_by_token + i, mask=in_k & (n < M), other=0.0).to(tl.float32)
        if BY_KEY:
            above_n = tl.sum(tl.where(selected & visible, 1, 0), 0) != 0
            to_start = tl.exp(tl.sum(tl.where(above_n[:, None], log_a, 0.0), 0))
            q_n *= to_start
        o = tl.where(selected, tl.sum(q_n[:, None] * s, 0)[None, :], o)
        if beta is not None:
            k_n = tl.load(k + n * k_by_token + i, mask=in_k & (n < M), other=0.0).to(tl.float32)
            if BY_KEY:
                k_n *= to_start
            read = tl.where(selected, tl.sum(k_n[:, None] * s, 0)[None, :], read)

    if BY_KEY:  # decays are already applied to readers and keys
        between = tl.where(visible, 1.0, 0.0)
        scale = tl.full((BM, 1), 1.0, tl.float32)
    else:
        scale = tl.exp(total)[:, None]
    v += b * M * v_by_token + h * W + first
    u = tl.load(v + m[:, None] * v_by_token + w[None, :], mask=mask, other=0.0).to(tl.float32)
    if beta is not None:
        strength = tl.load(beta + b * M * H + h + m * H, mask=in_m, other=0.0).to(tl.float32)[:, None]
        u = (u - scale * read) * strength
        inner = tl.where(below, between * inner * strength, 0.0)
        for n in tl.static_range(1, BM):
            selected = (m == n)[:, None]
            row = tl.sum(tl.where(selected, inner, 0.0), 0)
            u = tl.where(selected, u - tl.sum(row[:, None] * u, 0)[None, :], u)
    o *= scale
    weight *= between
    for n in tl.static_range(BM):
        column = tl.sum(tl.where((m == n)[None, :], weight, 0.0), 1)
        o += column[:, None] * tl.sum(tl.where((m == n)[:, None], u, 0.0), 0)[None, :]
    tl.store(at_out, o.to(out.dtype.element_ty), mask=mask)

    if record_slab is not None:
        slab = tl.load(record_slab + b * M + m, mask=in_m, other=0)
        index = tl.load(record_index + b * M + m, mask=in_m, other=0)
        at = update + (slab * update_by_slab + index * update_by_index)[:, None] + w[None, :]
        tl.store(at, u, mask=mask)
        if first == 0:
            log = decays + slab * decay_by_slab + index * decay_by_index
            if BY_KEY:
                tl.store(log[:, None] + i[None, :], log_a, mask=in_mk)
            else:
                tl.store(log, log_a, mask=in_m)
    else:
        if BY_KEY:
            s *= tl.exp(tl.sum(log_a, 0))[:, None]
        else:
            u *= tl.sum(tl.where((m == M - 1)[:, None], between, 0.0), 0)[:, None]
            s *= tl.exp(tl.sum(log_a, 0))
        for n in tl.static_range(BM):
            k_n = tl.load(k + n * k_by_token + i, mask=in_k & (n < M), other=0.0).to(tl.float32)
            if BY_KEY:
                k_n *= tl.exp(tl.sum(tl.where((m > n)[:, None], log_a, 0.0), 0))
            s += k_n[:, None] * tl.sum(tl.where((m == n)[:, None], u, 0.0), 0)[None, :]
        tl.store(row_state, s, mask=in_state)


@kernel(do_not_specialize=["M"])
def _snapshots(
    q, q_by_token, k, k_by_token, v, v_by_token, decay, beta, out, state, state_by_slot, slots, snapshots,
    ancestors, M, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BW: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    overlap()
    first, h, b = tl.program_id(0) * BW, tl.program_id(1), tl.program_id(2).to(tl.int64)
    g = h // (H // G)
    i, w = tl.arange(0, BK), tl.arange(0, BW)
    in_k, in_w = i < K, inside(w, first, W, BW)
    in_state = in_k[:, None] & in_w[None, :]
    state += h * K * W + first + i[:, None] * W + w[None, :]
    root = tl.load(slots + b)
    for m in range(M):
        token = b * M + m
        at_out = out + (token * H + h) * W + first + w
        if root == 0:
            tl.store(at_out, tl.zeros((BW,), out.dtype.element_ty), mask=in_w)
        else:
            source = root
            if ancestors is not None:  # Topological order: the parent is the last ancestor.
                for j in range(m):
                    if tl.load(ancestors + token * M + j) != 0:
                        source = tl.load(snapshots + b * M + j)
            elif m > 0:
                source = tl.load(snapshots + token - 1)
            tl.debug_barrier()  # The parent's state was stored by all threads.
            s = tl.load(state + source * state_by_slot, mask=in_state, other=0.0)
            if BY_KEY:
                log_a = tl.load(decay + (token * H + h) * K + i, mask=in_k, other=0.0).to(tl.float32)
                s *= tl.exp(log_a)[:, None]
            else:
                s *= tl.exp(tl.load(decay + token * H + h).to(tl.float32))
            k_n = tl.load(k + token * k_by_token + g * K + i, mask=in_k, other=0.0).to(tl.float32)
            q_n = tl.load(q + token * q_by_token + g * K + i, mask=in_k, other=0.0).to(tl.float32)
            u = tl.load(v + token * v_by_token + h * W + first + w, mask=in_w, other=0.0).to(tl.float32)
            if beta is not None:
                u = tl.load(beta + token * H + h).to(tl.float32) * (u - tl.sum(k_n[:, None] * s, 0))
            s += k_n[:, None] * u[None, :]
            tl.store(at_out, tl.sum(q_n[:, None] * s, 0).to(out.dtype.element_ty), mask=in_w)
            tl.store(state + tl.load(snapshots + token) * state_by_slot, s, mask=in_state)
