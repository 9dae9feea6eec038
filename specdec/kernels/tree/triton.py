"""Trees on a GPU: each operation is one launch with one program per row and no host synchronisation.

All arithmetic is integer or float64 in the host's order, so results match cpu.py bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.group import RecordIds
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.sampling.triton import splitmix64


def relations(parent_BM: Tensor, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = parent_BM.shape
    depth_BM = _like(parent_BM, rows, width)
    ancestors_BMM = _like(parent_BM, rows, width, width, dtype=torch.bool)
    tap_BMC = _like(parent_BM, rows, width, taps)
    _relations[(rows,)](
        *(_whole(parent_BM), depth_BM, ancestors_BMM, tap_BMC, width),
        TAPS=taps,
        BLOCK=triton.next_power_of_2(width),
    )
    return depth_BM, ancestors_BMM, tap_BMC


def walk(chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor) -> tuple[Tensor, Tensor]:
    node_BM, count_B = torch.empty_like(_whole(chosen_BM)), _like(chosen_BM, len(chosen_BM))
    _walk[(len(chosen_BM),)](
        *map(_whole, (chosen_BM, token_BM, parent_BM)),
        *(node_BM, count_B, chosen_BM.shape[1]),
        BLOCK=triton.next_power_of_2(chosen_BM.shape[1]),
        num_warps=1,
    )
    return node_BM, count_B


def accept_at_rates(
    chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, rate_N: Tensor, seed_B: Tensor, position_B: Tensor
) -> tuple[Tensor, Tensor]:
    new_chosen_BM, new_token_BM = torch.empty_like(_whole(chosen_BM)), torch.empty_like(_whole(token_BM))
    _accept_at_rates[(len(chosen_BM),)](
        *map(_whole, (chosen_BM, token_BM, parent_BM, rate_N, seed_B, position_B)),
        *(new_chosen_BM, new_token_BM, len(rate_N), chosen_BM.shape[1]),
        BLOCK=triton.next_power_of_2(chosen_BM.shape[1]),
        num_warps=1,
    )
    return new_chosen_BM, new_token_BM


def promote(
    node_BM: Tensor,
    count_B: Tensor,
    record: RecordIds,
    path: RecordIds,
    path_length_B: Tensor,
    length_B: Tensor,
) -> None:
    rows, width = node_BM.shape
    assert path_length_B.is_contiguous() and length_B.is_contiguous()
    assert all(ids_BN.stride(1) == 1 and ids_BN.shape[1] >= width for ids_BN in (*path, *record))
    assert path.slab_BN.stride() == path.index_BN.stride()
    _promote[(rows,)](
        *map(_whole, (node_BM, count_B, *record)),
        *(*path, path_length_B, length_B),
        *(width, record.slab_BN.shape[1], path.slab_BN.stride(0)),
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )


def children(prob_BFK: Tensor, score_BF: Tensor, depth: int, table_3DR: Tensor) -> Tensor:
    rows, nodes, ranks = prob_BFK.shape
    _, depths, ranks_known = table_3DR.shape
    out_BFK = torch.empty(prob_BFK.shape, dtype=torch.float64, device=prob_BFK.device)
    _children[(rows,)](
        *map(_whole, (prob_BFK, score_BF, table_3DR)),
        *(out_BFK, nodes, min(depth, depths) - 1, depths, ranks_known),
        RANKS=ranks,
        BLOCK=triton.next_power_of_2(nodes),
        num_warps=1,
    )
    return out_BFK


def frontier(score_BN: Tensor, count: int) -> Tensor:
    rows, nodes = score_BN.shape
    index_BC = _like(score_BN, rows, min(count, nodes))
    _frontier[(rows,)](
        *(_whole(score_BN), index_BC, nodes, index_BC.shape[1]),
        BLOCK=triton.next_power_of_2(nodes),
        num_warps=1 if nodes <= 64 else 4,
    )
    return index_BC


def prune(
    token_BN: Tensor, parent_BN: Tensor, score_BN: Tensor, belief_BN: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, nodes = score_BN.shape
    count = min(count, nodes)
    kept = [torch.empty(rows, count, dtype=x.dtype, device=x.device) for x in (token_BN, parent_BN)]
    kept += [torch.empty(rows, count, dtype=x.dtype, device=x.device) for x in (score_BN, belief_BN)]
    _prune[(rows,)](
        *map(_whole, (token_BN, parent_BN, score_BN, belief_BN)),
        *(*kept, nodes, count),
        BLOCK=triton.next_power_of_2(nodes),
        num_warps=1 if nodes <= 64 else 4,
    )
    token_BM, parent_BM, score_BM, belief_BM = kept
    return token_BM, parent_BM, score_BM, belief_BM


def _like(x: Tensor, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _whole(x: Tensor) -> Tensor:
    return x.contiguous()


@kernel(do_not_specialize=["width"])
def _relations(parent, depth, ancestors, tap, width, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    overlap()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    parent += row * width
    levels = tl.zeros([BLOCK], tl.int64)
    seen = at[:, None] == at[None, :]
    up = tl.load(parent + at, mask=inside, other=-1)
    while tl.max(up, 0) >= 0:
        levels += (up >= 0).to(tl.int64)
        seen |= up[:, None] == at[None, :]
        up = tl.load(parent + up, mask=up >= 0, other=-1)
    tl.store(depth + row * width + at, levels, mask=inside)
    square = (row * width + at[:, None]) * width + at[None, :]
    tl.store(ancestors + square, seen, mask=inside[:, None] & inside[None, :])
    node = at.to(tl.int64)
    for back in tl.static_range(TAPS):
        # Above the root the path continues into the inputs before the window.
        input_index = TAPS - 1 + tl.where(levels >= back, node, levels - back)
        tl.store(tap + (row * width + at) * TAPS + TAPS - 1 - back, input_index, mask=inside)
        node = tl.load(parent + node, mask=inside & (node >= 0), other=-1)


@kernel(do_not_specialize=["width"])
def _walk(chosen, token, parent, node, count, width, BLOCK: tl.constexpr):
    overlap()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    chosen += row * width
    tokens = tl.load(token + row * width + at, mask=inside, other=-1)
    parents = tl.load(parent + row * width + at, mask=inside, other=-2)
    nodes, length = at.to(tl.int64), 1
    wanted = tl.load(chosen)
    child = tl.min(tl.where((parents == 0) & (tokens != -1) & (tokens == wanted), at, BLOCK), 0)
    while child < BLOCK:
        nodes = tl.where(at == length, child, nodes)
        length += 1
        wanted = tl.load(chosen + child)
        child = tl.min(tl.where((parents == child) & (tokens != -1) & (tokens == wanted), at, BLOCK), 0)
    kept = tl.where(wanted == -1, length - 1, length)
    tl.store(node + row * width + at, tl.where(at < kept, nodes, at), mask=inside)
    tl.store(count + row, kept)


@kernel(do_not_specialize=["depths", "width"])
def _accept_at_rates(
    chosen, token, parent, rate, seed, position, new_chosen, new_token, depths, width,
    BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    parent += row * width
    tokens = tl.load(token + row * width + at, mask=inside, other=-1)
    parents = tl.load(parent + at, mask=inside, other=-2)
    other_tokens = tl.load(token + row * width + at[None, :], mask=inside[None, :], other=-1)
    other_parents = tl.load(parent + at[None, :], mask=inside[None, :], other=-2)
    siblings = (parents[:, None] == other_parents) & (other_tokens != -1) & (at[None, :] < at[:, None])
    is_first = (tokens != -1) & (parents >= 0) & (tl.sum(siblings.to(tl.int32), 1) == 0)
    depth, up = tl.zeros([BLOCK], tl.int64), parents
    while tl.max(up, 0) > 0:
        depth += (up > 0).to(tl.int64)
        up = tl.load(parent + up, mask=up > 0, other=-1)
    # Compare the rate with a random 64-bit integer.
    scaled = tl.load(rate + depth, mask=inside & (depth < depths), other=0.0) * 4294967296.0
    start = splitmix64(tl.load(seed + row).to(tl.uint64))
    drawn = splitmix64(start ^ (tl.load(position + row) + depth).to(tl.uint64))
    high, low = (drawn >> 32).to(tl.int64), (drawn & 0xFFFFFFFF).to(tl.int64)
    bound = tl.floor(scaled)
    low_bound = tl.ceil((scaled - bound) * 4294967296.0).to(tl.int64)
    high_bound = bound.to(tl.int64)
    accepts = is_first & ((high < high_bound) | ((high == high_bound) & (low < low_bound)))
    tl.store(new_token + row * width + at, tl.where(accepts | (at == 0), tokens, -1), mask=inside)
    tl.store(new_chosen + row * width + at, tl.load(chosen + row * width + at, mask=inside), mask=inside)
    tl.debug_barrier()
    tl.store(new_chosen + row * width + parents, tokens, mask=accepts)


@kernel(do_not_specialize=["width", "records", "by_row"])
def _promote(
    node, count, slab, index, path_slab, path_index, path_length, length, width, records, by_row,
    BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    row = tl.program_id(0).to(tl.int64)
    before = tl.load(length + row)
    if before > 0:
        at = tl.arange(0, BLOCK)
        kept = tl.load(count + row)
        mask = at < kept
        record_at = row * records + tl.load(node + row * width + at, mask=mask, other=0)
        tl.store(path_slab + row * by_row + at, tl.load(slab + record_at, mask=mask), mask=mask)
        tl.store(path_index + row * by_row + at, tl.load(index + record_at, mask=mask), mask=mask)
        tl.store(path_length + row, kept)
        tl.store(length + row, before + kept)


@kernel(do_not_specialize=["nodes", "depth", "depths", "known"])
def _children(
    prob, score, table, out, nodes, depth, depths, ranks_known,
    RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the probabilities in a first pass and normalise in a second: they are few and cached."""
    overlap()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < nodes
    node_at = row * nodes + at
    total, chance = tl.zeros([BLOCK], tl.float64), tl.full([BLOCK], float("inf"), tl.float64)
    for rank in tl.static_range(RANKS):
        chance = _chance(prob + node_at * RANKS, table, rank, depth, depths, ranks_known, chance, inside)
        total += chance
    parent_score = tl.load(score + node_at, mask=inside, other=0.0)
    chance = tl.full([BLOCK], float("inf"), tl.float64)
    for rank in tl.static_range(RANKS):
        chance = _chance(prob + node_at * RANKS, table, rank, depth, depths, ranks_known, chance, inside)
        tl.store(out + node_at * RANKS + rank, parent_score * (chance / tl.maximum(total, 1.0)), mask=inside)


@triton.jit
def _chance(prob, table, rank, depth, depths, ranks_known, bound, inside):
    """Calibrate the next child's probability; `bound` is that of the previous child."""
    gain = table + depth * ranks_known + tl.minimum(rank, ranks_known - 1)
    drafter_prob = tl.minimum(tl.load(prob + rank, mask=inside, other=0.0).to(tl.float64), 1.0)
    chance = drafter_prob * tl.load(gain)
    chance = tl.maximum(chance, tl.load(gain + depths * ranks_known))
    return tl.minimum(bound, tl.minimum(chance, tl.load(gain + 2 * depths * ranks_known)))


@kernel(do_not_specialize=["nodes", "count"])
def _frontier(score, index, nodes, count, BLOCK: tl.constexpr):
    overlap()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    rank = _rank(score + row * nodes, nodes, at)
    tl.store(index + row * count + rank, at.to(tl.int64), mask=(at < nodes) & (rank < count))


@kernel(do_not_specialize=["nodes", "count"])
def _prune(
    token, parent, score, belief, kept_token, kept_parent, kept_score, kept_belief, nodes, count,
    BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    node_at = row * nodes + at
    kept = (at < nodes) & (_rank(score + row * nodes, nodes, at) < count)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    up = tl.load(parent + node_at, mask=kept, other=-1)
    moved = tl.gather(place, tl.maximum(up, 0).to(tl.int32), 0).to(tl.int64)
    to = row * count + place
    tl.store(kept_parent + to, tl.where(up < 0, up, moved), mask=kept)
    tl.store(kept_token + to, tl.load(token + node_at, mask=kept), mask=kept)
    tl.store(kept_score + to, tl.load(score + node_at, mask=kept), mask=kept)
    tl.store(kept_belief + to, tl.load(belief + node_at, mask=kept), mask=kept)


@triton.jit
def _rank(score, nodes, at):
    """Return each score's rank; ties go to the earlier node."""
    score_at = tl.load(score + at, mask=at < nodes, other=-1.0)
    rank = tl.zeros_like(at)
    for other in range(nodes):
        value = tl.load(score + other)
        rank += ((value > score_at) | ((value == score_at) & (other < at))).to(tl.int32)
    return rank
