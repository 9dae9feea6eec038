"""The recurrence over a wide window, in parts of 16 tokens.

A first kernel computes everything that does not depend on the state, in parallel: within a part of 16 it
solves the nodes' updates by (I + A)⁻¹. A chain's state advances from part to part; a tree's nodes all read
the committed state and the updates of earlier parts. Prefill chunks and wide draft windows use the same
kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.conv.triton import record_ids
from specdec.kernels.group import Group, RecurrentMemory
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.pending.triton import fold_path, inside, path_arguments
from specdec.kernels.strides import dense, outer_strides

PART = 16
"""Minimum size of a matrix product's dimension."""
COLUMNS = 32
NARROW, WIDE, EXACT = "tf32", "tf32x3", "ieee"
"""Precision of products with keys, queries and updates. NARROW: 16-bit models, where a state is then off by
3e-4 after a few hundred steps. WIDE: float32, where wide windows must agree with the exact sums of narrow
ones. EXACT: trees with decays by key in float32, where the registers do not fit the parts of WIDE's three
products."""
SUM_PRECISION = tl.constexpr("tf32x3")
"""Precision of products that compute sums: close to float32."""


def chunk_scan(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THW: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor | None,
    memory: RecurrentMemory,
    group: Group,
    k_path_BPGK: Tensor | None,
) -> Tensor:
    """Compute `scan_window` for windows that leave records or advance states; heads must be contiguous."""
    state = memory.state_SHKW
    (groups, size), (heads, columns) = k_TGK.shape[1:], v_THW.shape[1:]
    parts, device = triton.cdiv(group.width, PART), q_TGK.device
    ancestors = None if group.ancestors_BMM is None else group.ancestors_BMM.contiguous().view(torch.uint8)
    key_parts = 1 if ancestors is None else parts
    # Per part: (I + A)⁻¹ and A, then the outputs' weights, for its own tokens or (trees) all parts' tokens.
    shape = (group.rows, heads, parts, 2, key_parts, PART, PART)
    matrix_BHL = torch.empty(shape, dtype=torch.float32, device=device)
    by_key = decay_TH.dim() == 3
    shape = (group.rows, heads, parts, PART, *([size] if by_key else []))
    scale_BHL = torch.empty(shape, dtype=torch.float32, device=device)
    out_THW = torch.empty(v_THW.shape, dtype=q_TGK.dtype, device=device)
    sizes: dict[str, int | str] = {
        "M": group.width,
        "G": groups,
        "H": heads,
        "K": size,
        "PART": PART,
        "BY_KEY": by_key,
    }
    sizes |= {"BK": max(triton.next_power_of_2(size), 16)}
    precise = EXACT if by_key and ancestors is not None else WIDE
    sizes |= {"PRECISION": NARROW if memory.input_SRC.itemsize == 2 else precise}
    inputs = (q_TGK, q_TGK.stride(0), k_TGK, k_TGK.stride(0), decay_TH, beta_TH)
    grid = (parts, heads, group.rows)
    _prepare[grid](*inputs, dense(group.state_B), ancestors, matrix_BHL, scale_BHL, **sizes, num_warps=4)
    # Decays by key fill the registers that other columns would use.
    block = max(16, min(COLUMNS // 2 if by_key else COLUMNS, triton.next_power_of_2(columns)))
    _chunk_scan[(triton.cdiv(columns, block), heads, group.rows)](
        *(*inputs, v_THW, v_THW.stride(0), matrix_BHL, scale_BHL, out_THW),
        *(state, *outer_strides(state, 3), dense(group.state_B)),
        **path_arguments(memory, group.path, group.path_length_B, k_path_BPGK),
        **dict(zip(("record_slab", "record_index"), record_ids(group.record), strict=True)),
        W=columns,
        TREE=ancestors is not None,
        BW=block,
        **sizes,
        num_warps=8 if by_key or memory.input_SRC.itemsize > 2 else 4,
    )
    return out_THW


@triton.jit
def _visible(ancestors, b, M, to, by, TREE: tl.constexpr):
    """Return whether nodes `by` are ancestors of nodes `to`, or these themselves."""
    valid = (to < M)[:, None] & (by < M)[None, :]
    if TREE:
        return tl.load(ancestors + (b * M + to[:, None]) * M + by[None, :], mask=valid, other=0) != 0
    return (to[:, None] >= by[None, :]) & valid


@kernel(do_not_specialize=["M"])
def _prepare(
    q, q_by_token, k, k_by_token, decay, beta, slots, ancestors, matrix, scale, M,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PART: tl.constexpr,
    BY_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    overlap()
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tl.load(slots + b) == 0:
        return
    TREE: tl.constexpr = ancestors is not None
    g = h // (H // G)
    i, n = tl.arange(0, BK), tl.arange(0, PART)
    m = part * PART + n
    parts = tl.num_programs(0)
    at_row = ((b * H + h) * parts + part) * PART
    at_matrix = at_row * 2 * PART + n[:, None] * PART + n[None, :]
    key_parts = 1
    if TREE:
        at_matrix = at_row * 2 * PART * parts + n[:, None] * PART + n[None, :]
        key_parts = parts
    q += b * M * q_by_token + g * K
    k += b * M * k_by_token + g * K
    D: tl.constexpr = K if BY_KEY else 1
    decay += (b * M * H + h) * D
    in_k = (i < K)[None, :]
    in_qk = (m < M)[:, None] & in_k
    q_m = tl.load(q + m[:, None] * q_by_token + i[None, :], mask=in_qk, other=0.0).to(tl.float32)
    k_m = tl.load(k + m[:, None] * k_by_token + i[None, :], mask=in_qk, other=0.0).to(tl.float32)
    total = tl.zeros((PART, BK), tl.float32) if BY_KEY else tl.zeros((PART,), tl.float32)
    first = part
    if TREE:
        first = 0
    for r in range(first, part + 1):
        j = r * PART + n
        visible = _visible(ancestors, b, M, m, j, TREE)
        if BY_KEY:
            between = tl.where(visible, 1.0, 0.0)
            log_a = _decays_of(decay, j, i, M, H, K)
            total += tl.dot(between, log_a, input_precision=SUM_PRECISION)
            qk, kk = _pairs(q_m, k_m, k, k_by_token, decay, ancestors, b, part, r, n, i, M, H, K, BK, PART,
                                  TREE)  # fmt: skip
        else:
            # Sum the decays between two nodes from their own tokens: i and its ancestors, strictly below j.
            between = tl.zeros((PART, PART), tl.float32)
            for t in range(r, part + 1):
                t_nodes = t * PART + n
                log_a = tl.load(decay + t_nodes * H, mask=t_nodes < M, other=0.0).to(tl.float32)
                part_sum = tl.where(_visible(ancestors, b, M, m, t_nodes, TREE), log_a[None, :], 0.0)
                strict = _visible(ancestors, b, M, t_nodes, j, TREE) & (t_nodes[:, None] != j[None, :])
                between += tl.dot(part_sum, strict.to(tl.float32), input_precision=SUM_PRECISION)
                if t == r:
                    total += tl.sum(part_sum, 1)
            between = tl.where(visible, tl.exp(between), 0.0)
            k_j = tl.load(k + j[:, None] * k_by_token + i[None, :], mask=(j < M)[:, None] & in_k, other=0.0)
            k_j = tl.trans(k_j.to(tl.float32))
            qk = tl.dot(q_m, k_j, input_precision=PRECISION)
            kk = tl.dot(k_m, k_j, input_precision=PRECISION)
        tl.store(matrix + at_matrix + (key_parts + r - first) * PART * PART, between * qk)
        if beta is not None:
            strength = tl.load(beta + (b * M + m) * H + h, mask=m < M, other=0.0).to(tl.float32)
            inner = between * kk * strength[:, None]
            if r == part:
                inner = tl.where(n[:, None] > n[None, :], -inner, 0.0)
                for row in tl.static_range(1, PART):
                    selected = (n == row)[:, None]
                    row_values = tl.sum(tl.where(selected, inner, 0.0), 0)
                    row_values += tl.sum(row_values[:, None] * inner, 0)
                    inner = tl.where(selected, row_values[None, :], inner)
                inner += tl.where(n[:, None] == n[None, :], 1.0, 0.0)
            tl.store(matrix + at_matrix + (r - first) * PART * PART, inner)
    if BY_KEY:
        tl.store(scale + (at_row + n)[:, None] * K + i[None, :], tl.exp(total), mask=in_k)
    else:
        tl.store(scale + at_row + n, tl.exp(total))


@triton.jit
def _decays_of(decay, m, i, M, H: tl.constexpr, K: tl.constexpr):
    """Load the log-decays by keys of tokens m of one head."""
    mask = (m < M)[:, None] & (i < K)[None, :]
    return tl.load(decay + m[:, None] * (H * K) + i[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _pairs(
    q_m, k_m, k, k_by_token, decay, ancestors, b, part, r, n, i, M, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, PART: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Return the products of a part's queries and keys with part r's keys, decayed to the part's nodes.

    Every exponent is a sum of decays between a node and its ancestor, so at most 0.
    """
    qk = tl.zeros((PART, PART), tl.float32)
    kk = tl.zeros((PART, PART), tl.float32)
    m, j = part * PART + n, r * PART + n
    for column in range(PART):
        selected = (n == column)[None, :]
        between = tl.zeros((PART, BK), tl.float32)
        for t in range(r, part + 1):
            t_nodes = t * PART + n
            below = _visible(ancestors, b, M, t_nodes, j, TREE) & (t_nodes[:, None] != j[None, :]) & selected
            step = (
                _visible(ancestors, b, M, m, t_nodes, TREE) & (tl.sum(tl.where(below, 1, 0), 1) != 0)[None, :]
            )
            log_a = _decays_of(decay, t_nodes, i, M, H, K)
            between += tl.dot(step.to(tl.float32), log_a, input_precision=SUM_PRECISION)
        at = r * PART + column
        k_j = tl.load(k + at * k_by_token + i, mask=(i < K) & (at < M), other=0.0).to(tl.float32)
        decayed_k = tl.exp(between) * k_j[None, :]
        qk += tl.where(selected, tl.sum(q_m * decayed_k, 1)[:, None], 0.0)
        kk += tl.where(selected, tl.sum(k_m * decayed_k, 1)[:, None], 0.0)
    return qk, kk


@triton.jit
def _decay_to(log_a, n, end):
    """Return the decay from each token n of a part to its token `end`, and that of the part's start state."""
    later = (n[None, :] > n[:, None]) & (n[None, :] <= end)
    weight = tl.exp(tl.sum(tl.where(later, log_a[None, :], 0.0), 1))
    return tl.where(n <= end, weight, 0.0), tl.exp(tl.sum(tl.where(n <= end, log_a, 0.0)))


@kernel(do_not_specialize=["P", "M"])
def _chunk_scan(
    q, q_by_token, k, k_by_token, decay, beta, v, v_by_token, matrix, scale, out, state, state_by_slot, slots,
    keys, path_slab, path_index, path_length, P, update, update_by_slab, update_by_index, decays,
    decay_by_slab, decay_by_index, record_slab, record_index, M, G: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, TREE: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
    PART: tl.constexpr, BY_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    overlap()
    first, h, b = tl.program_id(0) * BW, tl.program_id(1), tl.program_id(2).to(tl.int64)
    g = h // (H // G)
    i, w, n = tl.arange(0, BK), tl.arange(0, BW), tl.arange(0, PART)
    in_k, in_w = i < K, inside(w, first, W, BW)
    parts = tl.cdiv(M, PART)
    slot = tl.load(slots + b)
    out += b * M * H * W + h * W + first
    if slot == 0:
        for part in range(parts):
            m = part * PART + n
            at = out + m[:, None].to(tl.int64) * (H * W) + w[None, :]
            tl.store(at, tl.zeros((PART, BW), out.dtype.element_ty), mask=(m < M)[:, None] & in_w[None, :])
        return
    state += h * K * W + first
    update += h * W + first
    D: tl.constexpr = K if BY_KEY else 1
    decays += h * D
    at_head = i[:, None] * W + w[None, :]
    in_state = in_k[:, None] & in_w[None, :]
    row_state = state + slot * state_by_slot + at_head
    s = tl.load(row_state, mask=in_state, other=0.0)
    if path_slab is not None:
        length = tl.load(path_length + b)
        s = fold_path(s, keys + (b * P * G + g) * K, path_slab + b * P, path_index + b * P, length, update,
                      update_by_slab, update_by_index, decays, decay_by_slab, decay_by_index, i, w, in_k,
                      in_w, G * K, BY_KEY)  # fmt: skip
        if record_slab is not None and length > 0:
            tl.store(row_state, s, mask=in_state)
    q += b * M * q_by_token + g * K
    k += b * M * k_by_token + g * K
    v += b * M * v_by_token + h * W + first
    decay += (b * M * H + h) * D
    key_parts = 1
    if TREE:
        key_parts = parts
    square = n[:, None] * PART + n[None, :]
    for part in range(parts):
        m = part * PART + n
        in_m = m < M
        token = b * M + m
        mask = in_m[:, None] & in_w[None, :]
        at_row = ((b * H + h) * parts + part) * PART
        inverse = matrix + at_row * 2 * PART * key_parts + square
        weights = inverse + key_parts * PART * PART
        if BY_KEY:
            to_start = tl.load(scale + (at_row + n)[:, None] * K + i[None, :], mask=in_k[None, :], other=0.0)
            log_a = _decays_of(decay, m, i, M, H, K)
        else:
            to_start = tl.load(scale + at_row + n)[:, None]
            log_a = tl.load(decay + m * H, mask=in_m, other=0.0).to(tl.float32)
        in_qk = in_m[:, None] & in_k[None, :]
        q_m = tl.load(q + m[:, None] * q_by_token + i[None, :], mask=in_qk, other=0.0).to(tl.float32)
        if BY_KEY:
            o = tl.dot(q_m * to_start, s, input_precision=PRECISION)
        else:
            o = to_start * tl.dot(q_m, s, input_precision=PRECISION)
        u = tl.load(v + m[:, None] * v_by_token + w[None, :], mask=mask, other=0.0).to(tl.float32)
        k_m = tl.load(k + m[:, None] * k_by_token + i[None, :], mask=in_qk, other=0.0).to(tl.float32)
        if beta is not None:
            strength = tl.load(beta + token * H + h, mask=in_m, other=0.0).to(tl.float32)[:, None]
            if BY_KEY:
                u = (u - tl.dot(k_m * to_start, s, input_precision=PRECISION)) * strength
            else:
                u = (u - to_start * tl.dot(k_m, s, input_precision=PRECISION)) * strength
        if TREE:
            for r in range(part):
                earlier = b * M + r * PART + n
                slab, index = tl.load(record_slab + earlier), tl.load(record_index + earlier)
                at = update + (slab * update_by_slab + index * update_by_index)[:, None] + w[None, :]
                u_r = tl.load(at, mask=in_w[None, :], other=0.0)
                o += tl.dot(tl.load(weights + r * PART * PART), u_r, input_precision=PRECISION)
                if beta is not None:
                    u -= tl.dot(tl.load(inverse + r * PART * PART), u_r, input_precision=PRECISION)
            inverse += part * PART * PART
            weights += part * PART * PART
        if beta is not None:
            u = tl.dot(tl.load(inverse), u, input_precision=PRECISION)
        o += tl.dot(tl.load(weights), u, input_precision=PRECISION)
        at = out + m[:, None].to(tl.int64) * (H * W) + w[None, :]
        tl.store(at, o.to(out.dtype.element_ty), mask=mask)
        if record_slab is not None:
            slab = tl.load(record_slab + token, mask=in_m, other=0)
            index = tl.load(record_index + token, mask=in_m, other=0)
            at = update + (slab * update_by_slab + index * update_by_index)[:, None] + w[None, :]
            tl.store(at, u, mask=mask)
            if first == 0:
                log = decays + slab * decay_by_slab + index * decay_by_index
                if BY_KEY:
                    tl.store(log[:, None] + i[None, :], log_a, mask=in_qk)
                else:
                    tl.store(log, log_a, mask=in_m)
            tl.debug_barrier()  # The next part reads all threads' stores.
        if not TREE:
            if BY_KEY:
                later = (n[None, :] > n[:, None]).to(tl.float32)
                # Loaded again: the registers were reused.
                log_a = _decays_of(decay, m, i, M, H, K)
                k_m = tl.load(k + m[:, None] * k_by_token + i[None, :], mask=in_qk, other=0.0).to(tl.float32)
                k_m *= tl.exp(tl.dot(later, log_a, input_precision=SUM_PRECISION))
                s = s * tl.exp(tl.sum(log_a, 0))[:, None] + tl.dot(
                    tl.trans(k_m), u, input_precision=PRECISION
                )
            else:
                weight, total = _decay_to(log_a, n, PART - 1)
                s = s * total + tl.dot(tl.trans(k_m), u * weight[:, None], input_precision=PRECISION)
    if record_slab is None:
        tl.store(row_state, s, mask=in_state)
