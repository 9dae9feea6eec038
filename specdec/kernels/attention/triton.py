"""Paged attention on a GPU: tree windows, chains and whole prompts through one kernel.

The queries of all heads that share a key head are rows of one tile, node after node, so keys and values are
read once for all of them. A row's tokens are cut into enough splits to keep the GPU busy, and a second kernel
merges them. The host chooses the number of splits from an upper bound (`max_length`); the device chooses
their ends from the row's actual length, so a captured graph works for rows of any length.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.group import Group
from specdec.kernels.kv_cache.triton import page_strides
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.strides import dense, outer_strides

TREE_NODES = 64
"""Maximum nodes of a tree: a node's ancestors are the bits of one integer."""
PROGRAMS = 2
"""Target number of programs per GPU processor."""
LEAST = 128
"""Minimum tokens per split that pay for its merge; more if many queries share them."""
MOST_SPLITS = 128


def attend(
    q_THD: Tensor,
    pages_NPXJD: Tensor,
    group: Group,
    scale: float,
    window: int | None = None,
    value_dim: int | None = None,
) -> Tensor:
    return attend_gated(q_THD, None, pages_NPXJD, group, scale, window, value_dim)


def attend_gated(
    q_THD: Tensor,
    gate_THD: Tensor | None,
    pages_NPXJD: Tensor,
    group: Group,
    scale: float,
    window: int | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Attend and multiply by sigmoid(gate); the gate is a view whose heads may be strided."""
    q_THD = q_THD.contiguous()
    tokens, heads, dim = q_THD.shape
    _, parts, page, kv_heads, _ = pages_NPXJD.shape
    width = value_dim or dim
    queries = group.width * (heads // kv_heads)
    tree, itemsizes = group.ancestors_BMM is not None, (q_THD.itemsize, pages_NPXJD.itemsize)
    tile = _tile(queries, dim, width, *itemsizes, tree=tree, slides=window is not None)
    blocks = triton.cdiv(queries, tile["QUERIES"])
    programs, longest = group.rows * kv_heads * blocks, group.max_length + group.width
    if window is not None:
        longest = min(longest, window + group.width)
    splits = choose_splits(programs, longest, tile["QUERIES"], q_THD.device)
    out_THW = torch.empty(tokens, heads, width, dtype=q_THD.dtype, device=q_THD.device)
    part_STHW, peak_STH, sum_STH = out_THW, out_THW, out_THW
    if splits > 1:
        part_STHW = torch.empty(splits, tokens, heads, width, dtype=torch.float32, device=q_THD.device)
        peak_STH = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q_THD.device)
        sum_STH = torch.empty_like(peak_STH)
    seen_BMM = None if group.ancestors_BMM is None else dense(group.ancestors_BMM).view(torch.uint8)
    assert seen_BMM is None or group.width <= TREE_NODES
    by_token, by_head = (0, 0) if gate_THD is None else outer_strides(gate_THD, 1)
    gated = {"GATE_BY_TOKEN": by_token, "GATE_BY_HEAD": by_head}
    _attend[(group.rows * blocks, kv_heads, splits)](
        *(q_THD, pages_NPXJD, group.table_BN, dense(group.length_B), seen_BMM, gate_THD),
        *(out_THW, part_STHW, peak_STH, sum_STH),
        *(group.width, *outer_strides(group.table_BN, 1)),
        **page_strides(pages_NPXJD),
        tokens=tokens,
        splits=splits,
        scale=scale / math.log(2),
        **{"H": heads, "J": kv_heads, "D": dim, "W": width, "PARTS": parts, "PAGE": page},
        **{"SPLIT": splits > 1, "LEAST": LEAST},
        WINDOW=window,
        **gated,
        **tile,
    )
    if splits > 1:
        _merge[(tokens, heads)](
            *(part_STHW, peak_STH, sum_STH, gate_THD, out_THW, tokens, splits),
            **{"H": heads, "W": width, "SPLITS": MOST_SPLITS},
            **gated,
            BLOCK=triton.next_power_of_2(width),
            num_warps=4,
        )
    return out_THW


def choose_splits(programs: int, longest: int, queries: int, device: torch.device) -> int:
    """Return the number of splits per row that gives every processor work."""
    wanted = -(-PROGRAMS * processors(device) // programs)
    return max(min(wanted, longest // max(LEAST, 2 * queries), MOST_SPLITS), 1)


@cache
def processors(device: torch.device) -> int:
    """Return the GPU's processor count, or an H100's 132 without a GPU."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _tile(
    queries_per_head: int, dim: int, width: int, itemsize: int, paged: int, *, tree: bool, slides: bool
) -> dict[str, int]:
    """Choose the queries and keys per program: what fits into an H100's registers without spills.

    Tensor cores take at least 16 queries. Heads of 256 fill the registers at 64 queries, or 16 in float32.
    Values of 512 fill them at 64 queries with few keys, or 32 with FP8 keys; in float32 not even 16 fit.
    """
    block, rest = (max(triton.next_power_of_2(size), 16) for size in (width, dim - width))
    large = block > 128
    if large and itemsize > 2:
        tile = {"QUERIES": 16, "KEYS": 32, "num_warps": 8, "num_stages": 2}
        return {**tile, "BLOCK": block, "REST": rest}
    if block > 256:
        narrow = paged < itemsize
        queries = min(max(triton.next_power_of_2(queries_per_head), 16), 32 if narrow else 64)
        tile = {"QUERIES": queries, "KEYS": 16 if narrow else 32, "num_warps": 8, "num_stages": 3}
        return {**tile, "BLOCK": block, "REST": rest}
    queries = min(max(triton.next_power_of_2(queries_per_head), 16), 64 if large else 128)
    few_keys = large and (queries == 16 or (queries == 64 and tree))
    few_warps = 16 if large else 32 if slides and tree else 64
    return {
        "QUERIES": queries,
        "KEYS": 32 if few_keys else 64,
        "BLOCK": block,
        "REST": rest,
        "num_warps": 8 if queries > few_warps else 4,
        "num_stages": 2 if block <= 64 and queries == 16 and tree else 3,
    }


@kernel(
    do_not_specialize=["width", "tables", "block_stride", "tokens", "splits"],
    do_not_specialize_on_alignment=["length"],
)
def _attend(
    q, pages, table, length, ancestors, gate, out, part, peaks, sums,
    width, tables, block_stride, tokens, splits, scale,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr,
    PAGE: tl.constexpr, BY_PART: tl.constexpr, BY_POSITION: tl.constexpr, BY_HEAD: tl.constexpr,
    SPLIT: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr,
    GATE_BY_TOKEN: tl.constexpr, GATE_BY_HEAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    overlap()
    G: tl.constexpr = H // J
    kind = q.dtype.element_ty
    # The last queries of a prompt have the most keys: start them first.
    blocks = tl.cdiv(width * G, QUERIES)
    row, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    kv_head, split = tl.program_id(1), tl.program_id(2)
    query_index = block * QUERIES + tl.arange(0, QUERIES)
    node = tl.minimum(query_index // G, width - 1)
    store = query_index < width * G
    head_at = (row.to(tl.int64) * width + node) * H + kv_head * G + query_index % G

    committed = tl.load(length + row).to(tl.int32)
    if ancestors is None:
        end = committed + tl.minimum((block * QUERIES + QUERIES - 1) // G + 1, width)
    else:
        end = committed + width
    if ancestors is not None:
        other = tl.arange(0, 64)
        seen_at = ancestors + (row.to(tl.int64) * width + node[:, None]) * width + other[None, :]
        seen = tl.load(seen_at, mask=(other < width)[None, :], other=0).to(tl.int32)
    first = 0
    if WINDOW is not None:
        if ancestors is None:
            depth = node + 1
        else:
            depth = tl.sum(seen, axis=1)
            if WINDOW < 64:  # a path of nodes is never longer than 64
                seen = tl.where(tl.cumsum(seen, axis=1, reverse=True) <= WINDOW, seen, 0)
        first_visible = committed + depth - WINDOW
        first = tl.maximum(tl.min(first_visible), 0)
    begin, stop = first // KEYS * KEYS, end
    if SPLIT:
        keys_per_split = tl.cdiv(tl.maximum(tl.cdiv(end - begin, splits), LEAST), KEYS) * KEYS
        begin += split * keys_per_split
        stop = tl.minimum(begin + keys_per_split, end)
        if begin >= end:
            no_peak = tl.full([QUERIES], -float("inf"), tl.float32)
            tl.store(peaks + split.to(tl.int64) * tokens * H + head_at, no_peak, mask=store)
            return
    if ancestors is not None:
        bits = tl.sum(seen.to(tl.int64) << other[None, :].to(tl.int64), axis=1)

    # A key that contains its value ends in it; the entries before that are a separate product.
    at = tl.arange(0, BLOCK)
    query = tl.load(q + head_at[:, None] * D + (D - W) + at[None, :], mask=(at < W)[None, :], other=0.0)
    if D != W:
        rest_at_D = tl.arange(0, REST)
        rest_mask = (rest_at_D < D - W)[None, :]
        query_rest = tl.load(q + head_at[:, None] * D + rest_at_D[None, :], mask=rest_mask, other=0.0)
    peak = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, BLOCK], tl.float32)
    table += row.to(tl.int64) * tables
    pages += kv_head * BY_HEAD
    for start in range(begin, stop, KEYS):
        position = start + tl.arange(0, KEYS)
        valid = (position >= first) & (position < end)
        page = tl.load(table + position // PAGE, mask=valid, other=0)
        from_page = page * (block_stride.to(tl.int64) * 16) + position % PAGE * BY_POSITION
        key_at = pages + from_page[:, None] + (D - W) + at[None, :]
        mask = valid[:, None]
        if W != BLOCK:
            mask &= (at < W)[None, :]
        # Convert by way of float32: a GPU converts FP8 to float16, and is slow to go on to bfloat16.
        key = tl.load(key_at, mask=mask, other=0.0).to(tl.float32).to(kind)
        score = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        value = key
        if PARTS == 2:
            value = tl.load(key_at + BY_PART, mask=mask, other=0.0).to(tl.float32).to(kind)
        if D != W:
            rest_at = pages + from_page[:, None] + rest_at_D[None, :]
            rest = tl.load(rest_at, mask=valid[:, None] & rest_mask, other=0.0).to(tl.float32).to(kind)
            score = tl.dot(query_rest, tl.trans(rest), score, input_precision="tf32x3")
        score *= scale
        offset = position - committed
        if ancestors is None:
            visible = offset[None, :] <= node[:, None]
            if WINDOW is not None:
                visible &= position[None, :] >= first_visible[:, None]
        else:
            bit = tl.minimum(tl.maximum(offset, 0), 63).to(tl.int64)
            is_ancestor = ((bits[:, None] >> bit[None, :]) & 1) != 0
            earlier = (offset < 0)[None, :]
            if WINDOW is not None:
                earlier &= position[None, :] >= first_visible[:, None]
            visible = earlier | ((offset >= 0) & (offset < width))[None, :] & is_ancestor
        score = tl.where(visible, score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        # A node that has seen no key so far has no peak yet.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        rescale = tl.exp2(peak - base)
        weight = tl.exp2(score - base[:, None])
        total = total * rescale + tl.sum(weight, axis=1)
        # The weights are rounded before they multiply the values; the divisor is the sum of unrounded
        # weights.
        result = result * rescale[:, None]
        result = tl.dot(weight.to(kind), value, result, input_precision="tf32x3")
        peak = higher
    mask = store[:, None] & (at < W)[None, :]
    if SPLIT:
        head_at += split.to(tl.int64) * tokens * H
        tl.store(peaks + head_at, peak, mask=store)
        tl.store(sums + head_at, total, mask=store)
        tl.store(part + head_at[:, None] * W + at[None, :], result, mask=mask)
    else:
        result = (result / total[:, None]).to(kind)
        if gate is not None:
            gate_at = head_at // H * GATE_BY_TOKEN + head_at % H * GATE_BY_HEAD
            gates = tl.load(gate + gate_at[:, None] + at[None, :], mask=mask, other=0.0)
            result = _apply_gate(result, gates)
        tl.store(out + head_at[:, None] * W + at[None, :], result, mask=mask)


@triton.jit
def _apply_gate(value, gate):
    """Multiply by sigmoid(gate), rounded before and after as in separate operations."""
    sigmoid = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(value.dtype)
    return (value.to(tl.float32) * sigmoid.to(tl.float32)).to(value.dtype)


@kernel(do_not_specialize=["tokens", "splits"])
def _merge(
    part, peaks, sums, gate, out, tokens, splits,
    H: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr, GATE_BY_TOKEN: tl.constexpr,
    GATE_BY_HEAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head_at = token * H + head
    split = tl.arange(0, SPLITS)
    peak = tl.load(
        peaks + split.to(tl.int64) * tokens * H + head_at, mask=split < splits, other=-float("inf")
    )
    highest = tl.max(peak)
    # Splits beyond the row's end have no peak, and their sums are uninitialised.
    has_keys = peak > -float("inf")
    total = tl.load(sums + split.to(tl.int64) * tokens * H + head_at, mask=has_keys, other=0.0)
    total = tl.sum(total * tl.exp2(peak - highest))
    at = tl.arange(0, BLOCK)
    result = tl.zeros([BLOCK], tl.float32)
    for first in range(0, splits, 8):
        splits_8 = first + tl.arange(0, 8)
        entry = splits_8.to(tl.int64) * tokens * H + head_at
        split_peak = tl.load(peaks + entry, mask=splits_8 < splits, other=-float("inf"))
        mask = (split_peak > -float("inf"))[:, None] & (at < W)[None, :]
        value = tl.load(part + entry[:, None] * W + at[None, :], mask=mask, other=0.0)
        result += tl.sum(value * tl.exp2(split_peak - highest)[:, None], axis=0)
    result = (result / total).to(out.dtype.element_ty)
    if gate is not None:
        gates = tl.load(gate + token * GATE_BY_TOKEN + head * GATE_BY_HEAD + at, mask=at < W, other=0.0)
        result = _apply_gate(result, gates)
    tl.store(out + head_at * W + at, result, mask=at < W)
