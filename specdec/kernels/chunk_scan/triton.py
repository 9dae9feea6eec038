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
    above = None if group.ancestors_BMM is None else group.ancestors_BMM.contiguous().view(torch.uint8)
    near = 1 if above is None else parts
    # Per part: (I + A)⁻¹ and A, then the outputs' weights, for its own tokens or (trees) those of all parts.
    shape = (group.rows, heads, parts, 2, near, PART, PART)
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
    precise = EXACT if by_key and above is not None else WIDE
    sizes |= {"PRECISION": NARROW if memory.input_SRC.itemsize == 2 else precise}
    inputs = (q_TGK, q_TGK.stride(0), k_TGK, k_TGK.stride(0), decay_TH, beta_TH)
    grid = (parts, heads, group.rows)
    _prepare[grid](*inputs, dense(group.state_B), above, matrix_BHL, scale_BHL, **sizes, num_warps=4)
    # Decays by key fill the registers that other columns would use.
    block = max(16, min(COLUMNS // 2 if by_key else COLUMNS, triton.next_power_of_2(columns)))
    _chunk_scan[(triton.cdiv(columns, block), heads, group.rows)](
        *(*inputs, v_THW, v_THW.stride(0), matrix_BHL, scale_BHL, out_THW),
        *(state, *outer_strides(state, 3), dense(group.state_B)),
        **path_arguments(memory, group.path, group.path_length_B, k_path_BPGK),
        **dict(zip(("record_slab", "record_place"), record_ids(group.record), strict=True)),
        W=columns,
        TREE=above is not None,
        BW=block,
        **sizes,
        num_warps=8 if by_key or memory.input_SRC.itemsize > 2 else 4,
    )
    return out_THW


@triton.jit
def _over(above, b, M, to, by, TREE: tl.constexpr):
    """Return whether nodes `by` are ancestors of nodes `to`, or these themselves."""
    there = (to < M)[:, None] & (by < M)[None, :]
    if TREE:
        return tl.load(above + (b * M + to[:, None]) * M + by[None, :], mask=there, other=0) != 0
    return (to[:, None] >= by[None, :]) & there


@kernel(do_not_specialize=["M"])
def _prepare(
    q, q_by_token, k, k_by_token, decay, beta, slots, above, matrix, scale, M,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PART: tl.constexpr,
    BY_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    overlap()
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tl.load(slots + b) == 0:
        return
    TREE: tl.constexpr = above is not None
    g = h // (H // G)
    i, n = tl.arange(0, BK), tl.arange(0, PART)
    m = part * PART + n
    parts = tl.num_programs(0)
    at_row = ((b * H + h) * parts + part) * PART
    at_matrix = at_row * 2 * PART + n[:, None] * PART + n[None, :]
    near = 1
    if TREE:
        at_matrix = at_row * 2 * PART * parts + n[:, None] * PART + n[None, :]
        near = parts
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
        over = _over(above, b, M, m, j, TREE)
        if BY_KEY:
            between = tl.where(over, 1.0, 0.0)
            own = _decays_of(decay, j, i, M, H, K)
            total += tl.dot(between, own, input_precision=SUM_PRECISION)
            reads, meets = _pairs(q_m, k_m, k, k_by_token, decay, above, b, part, r, n, i, M, H, K, BK, PART,
                                  TREE)  # fmt: skip
        else:
            # Sum the decays between two nodes from their own tokens: i and its ancestors, strictly below j.
            between = tl.zeros((PART, PART), tl.float32)
            for t in range(r, part + 1):
                by = t * PART + n
                own = tl.load(decay + by * H, mask=by < M, other=0.0).to(tl.float32)
                part_sum = tl.where(_over(above, b, M, m, by, TREE), own[None, :], 0.0)
                strict = _over(above, b, M, by, j, TREE) & (by[:, None] != j[None, :])
                between += tl.dot(part_sum, strict.to(tl.float32), input_precision=SUM_PRECISION)
                if t == r:
                    total += tl.sum(part_sum, 1)
            between = tl.where(over, tl.exp(between), 0.0)
            k_j = tl.load(k + j[:, None] * k_by_token + i[None, :], mask=(j < M)[:, None] & in_k, other=0.0)
            k_j = tl.trans(k_j.to(tl.float32))
            reads = tl.dot(q_m, k_j, input_precision=PRECISION)
            meets = tl.dot(k_m, k_j, input_precision=PRECISION)
        tl.store(matrix + at_matrix + (near + r - first) * PART * PART, between * reads)
        if beta is not None:
            strength = tl.load(beta + (b * M + m) * H + h, mask=m < M, other=0.0).to(tl.float32)
            inner = between * meets * strength[:, None]
            if r == part:
                inner = tl.where(n[:, None] > n[None, :], -inner, 0.0)
                for row in tl.static_range(1, PART):
                    mine = (n == row)[:, None]
                    own_row = tl.sum(tl.where(mine, inner, 0.0), 0)
                    own_row += tl.sum(own_row[:, None] * inner, 0)
                    inner = tl.where(mine, own_row[None, :], inner)
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
    q_m, k_m, k, k_by_token, decay, above, b, part, r, n, i, M, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, PART: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Return the products of a part's queries and keys with part r's keys, decayed to the part's nodes.

    Every exponent is a sum of decays between a node and its ancestor, so none is above 0.
    """
    reads = tl.zeros((PART, PART), tl.float32)
    meets = tl.zeros((PART, PART), tl.float32)
    m, j = part * PART + n, r * PART + n
    for column in range(PART):
        mine = (n == column)[None, :]
        between = tl.zeros((PART, BK), tl.float32)
        for t in range(r, part + 1):
            by = t * PART + n
            under = _over(above, b, M, by, j, TREE) & (by[:, None] != j[None, :]) & mine
            step = _over(above, b, M, m, by, TREE) & (tl.sum(tl.where(under, 1, 0), 1) != 0)[None, :]
            own = _decays_of(decay, by, i, M, H, K)
            between += tl.dot(step.to(tl.float32), own, input_precision=SUM_PRECISION)
        at = r * PART + column
        k_j = tl.load(k + at * k_by_token + i, mask=(i < K) & (at < M), other=0.0).to(tl.float32)
        found = tl.exp(between) * k_j[None, :]
        reads += tl.where(mine, tl.sum(q_m * found, 1)[:, None], 0.0)
        meets += tl.where(mine, tl.sum(k_m * found, 1)[:, None], 0.0)
    return reads, meets


@triton.jit
def _until(own, n, end):
    """Return the decay from each token n of a part to its token `end`, and that of the part's start state."""
    later = (n[None, :] > n[:, None]) & (n[None, :] <= end)
    weight = tl.exp(tl.sum(tl.where(later, own[None, :], 0.0), 1))
    return tl.where(n <= end, weight, 0.0), tl.exp(tl.sum(tl.where(n <= end, own, 0.0)))


@kernel(do_not_specialize=["P", "M"])
def _chunk_scan(
    q, q_by_token, k, k_by_token, decay, beta, v, v_by_token, matrix, scale, out, state, state_by_slot, slots,
    keys, path_slab, path_place, path_length, P, update, update_by_slab, update_by_place, decays,
    decay_by_slab, decay_by_place, record_slab, record_place, M, G: tl.constexpr,
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
    home = state + slot * state_by_slot + at_head
    s = tl.load(home, mask=in_state, other=0.0)
    if path_slab is not None:
        length = tl.load(path_length + b)
        s = fold_path(s, keys + (b * P * G + g) * K, path_slab + b * P, path_place + b * P, length, update,
                      update_by_slab, update_by_place, decays, decay_by_slab, decay_by_place, i, w, in_k,
                      in_w, G * K, BY_KEY)  # fmt: skip
        if record_slab is not None and length > 0:
            tl.store(home, s, mask=in_state)
    q += b * M * q_by_token + g * K
    k += b * M * k_by_token + g * K
    v += b * M * v_by_token + h * W + first
    decay += (b * M * H + h) * D
    near = 1
    if TREE:
        near = parts
    square = n[:, None] * PART + n[None, :]
    for part in range(parts):
        m = part * PART + n
        in_m = m < M
        token = b * M + m
        mask = in_m[:, None] & in_w[None, :]
        at_row = ((b * H + h) * parts + part) * PART
        solve = matrix + at_row * 2 * PART * near + square
        weigh = solve + near * PART * PART
        if BY_KEY:
            grow = tl.load(scale + (at_row + n)[:, None] * K + i[None, :], mask=in_k[None, :], other=0.0)
            own = _decays_of(decay, m, i, M, H, K)
        else:
            grow = tl.load(scale + at_row + n)[:, None]
            own = tl.load(decay + m * H, mask=in_m, other=0.0).to(tl.float32)
        in_qk = in_m[:, None] & in_k[None, :]
        q_m = tl.load(q + m[:, None] * q_by_token + i[None, :], mask=in_qk, other=0.0).to(tl.float32)
        if BY_KEY:
            o = tl.dot(q_m * grow, s, input_precision=PRECISION)
        else:
            o = grow * tl.dot(q_m, s, input_precision=PRECISION)
        u = tl.load(v + m[:, None] * v_by_token + w[None, :], mask=mask, other=0.0).to(tl.float32)
        k_m = tl.load(k + m[:, None] * k_by_token + i[None, :], mask=in_qk, other=0.0).to(tl.float32)
        if beta is not None:
            strength = tl.load(beta + token * H + h, mask=in_m, other=0.0).to(tl.float32)[:, None]
            if BY_KEY:
                u = (u - tl.dot(k_m * grow, s, input_precision=PRECISION)) * strength
            else:
                u = (u - grow * tl.dot(k_m, s, input_precision=PRECISION)) * strength
        if TREE:
            for r in range(part):
                before = b * M + r * PART + n
                slab, place = tl.load(record_slab + before), tl.load(record_place + before)
                at = update + (slab * update_by_slab + place * update_by_place)[:, None] + w[None, :]
                u_r = tl.load(at, mask=in_w[None, :], other=0.0)
                o += tl.dot(tl.load(weigh + r * PART * PART), u_r, input_precision=PRECISION)
                if beta is not None:
                    u -= tl.dot(tl.load(solve + r * PART * PART), u_r, input_precision=PRECISION)
            solve += part * PART * PART
            weigh += part * PART * PART
        if beta is not None:
            u = tl.dot(tl.load(solve), u, input_precision=PRECISION)
        o += tl.dot(tl.load(weigh), u, input_precision=PRECISION)
        at = out + m[:, None].to(tl.int64) * (H * W) + w[None, :]
        tl.store(at, o.to(out.dtype.element_ty), mask=mask)
        if record_slab is not None:
            slab = tl.load(record_slab + token, mask=in_m, other=0)
            place = tl.load(record_place + token, mask=in_m, other=0)
            at = update + (slab * update_by_slab + place * update_by_place)[:, None] + w[None, :]
            tl.store(at, u, mask=mask)
            if first == 0:
                log = decays + slab * decay_by_slab + place * decay_by_place
                if BY_KEY:
                    tl.store(log[:, None] + i[None, :], own, mask=in_qk)
                else:
                    tl.store(log, own, mask=in_m)
            tl.debug_barrier()  # The next part reads all threads' stores.
        if not TREE:
            if BY_KEY:
                later = (n[None, :] > n[:, None]).to(tl.float32)
                # Loaded again: the registers were reused.
                own = _decays_of(decay, m, i, M, H, K)
                k_m = tl.load(k + m[:, None] * k_by_token + i[None, :], mask=in_qk, other=0.0).to(tl.float32)
                k_m *= tl.exp(tl.dot(later, own, input_precision=SUM_PRECISION))
                s = s * tl.exp(tl.sum(own, 0))[:, None] + tl.dot(tl.trans(k_m), u, input_precision=PRECISION)
            else:
                weight, total = _until(own, n, PART - 1)
                s = s * total + tl.dot(tl.trans(k_m), u * weight[:, None], input_precision=PRECISION)
    if record_slab is None:
        tl.store(home, s, mask=in_state)
