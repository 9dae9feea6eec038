"""Trees as tensors, all rows at once, on any device, without reading results on the host.

So a captured step may contain all of it. Where reference.py walks along a path, this doubles the distance to
an ancestor in each round.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.group import RecordIds
from specdec.kernels.sampling.cpu import splitmix64
from specdec.kernels.sampling.rules import NO_TOKEN


def relations(parent_BM: Tensor, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    node_M = _arange(parent_BM)
    up_BM = parent_BM.clamp(min=0)
    ancestors_BMM = (node_M[:, None] == node_M).expand(len(parent_BM), -1, -1)
    for _ in range(_rounds(parent_BM)):
        above_BMM = ancestors_BMM.gather(1, up_BM[..., None].expand_as(ancestors_BMM))
        ancestors_BMM = ancestors_BMM | above_BMM
        up_BM = up_BM.gather(1, up_BM)
    depth_BM = ancestors_BMM.sum(-1) - 1
    before, at_BM, taps_BM = taps - 1, node_M.expand_as(parent_BM), []
    for up in range(taps):
        # Above the root the path continues into the inputs before the window.
        taps_BM.append(before + torch.where(depth_BM >= up, at_BM, depth_BM - up))
        at_BM = parent_BM.gather(1, at_BM).clamp(min=0)
    return depth_BM, ancestors_BMM, torch.stack(taps_BM[::-1], -1)


def walk(chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor) -> tuple[Tensor, Tensor]:
    wanted_BM = chosen_BM.gather(1, parent_BM.clamp(min=0))
    node_BM, length_B = _follow((token_BM == wanted_BM) & (token_BM != NO_TOKEN), parent_BM)
    last_B1 = chosen_BM.gather(1, node_BM.gather(1, length_B[:, None] - 1))
    count_B = length_B - (last_B1[:, 0] == NO_TOKEN).long()
    node_M = _arange(node_BM)
    return torch.where(node_M < count_B[:, None], node_BM, node_M), count_B


def accept_at_rates(
    chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, rate_N: Tensor, seed_B: Tensor, position_B: Tensor
) -> tuple[Tensor, Tensor]:
    accepts_BN = _accepts(rate_N, seed_B, position_B)
    padded_BN = F.pad(accepts_BN, (0, max(token_BM.shape[1] - accepts_BN.shape[1], 1)))
    node_M, is_real_BM = _arange(token_BM), token_BM != NO_TOKEN
    siblings_BMM = (parent_BM[..., None] == parent_BM[:, None]) & is_real_BM[:, None]
    is_first_BM = ~(siblings_BMM & (node_M < node_M[:, None])).any(-1) & is_real_BM & (node_M > 0)
    depth_BM = relations(parent_BM, 1)[0]
    accepts_BM = is_first_BM & padded_BN.gather(1, (depth_BM - 1).clamp(min=0))
    # Rejected nodes write to an extra column, which is cut off.
    to_BM = torch.where(accepts_BM, parent_BM, len(node_M))
    new_BM = F.pad(chosen_BM, (0, 1)).scatter(1, to_BM, token_BM)[:, :-1]
    return new_BM, token_BM.masked_fill(~accepts_BM & (node_M > 0), NO_TOKEN)


def promote(
    node_BM: Tensor,
    count_B: Tensor,
    record: RecordIds,
    path: RecordIds,
    path_length_B: Tensor,
    length_B: Tensor,
) -> None:
    is_live_B = length_B > 0
    is_kept_BM = (_arange(node_BM) < count_B[:, None]) & is_live_B[:, None]
    for to_BP, from_BM in zip(path, record, strict=True):
        to_BM = to_BP[:, : node_BM.shape[1]]
        to_BM.copy_(torch.where(is_kept_BM, from_BM.gather(1, node_BM), to_BM))
    path_length_B.copy_(torch.where(is_live_B, count_B, path_length_B))
    length_B.add_(torch.where(is_live_B, count_B, 0))


def children(prob_BFK: Tensor, score_BF: Tensor, depth: int, table_3DR: Tensor) -> Tensor:
    _, depths, ranks = table_3DR.shape
    row_3R = table_3DR[:, min(depth, depths) - 1]
    total_BF, chances = torch.zeros_like(score_BF), list[Tensor]()
    for rank, prob_BF in enumerate(prob_BFK.double().clamp(max=1.0).unbind(-1)):
        gain, least, most = row_3R[:, min(rank, ranks - 1)].unbind()
        chance_BF = (prob_BF * gain).maximum(least).minimum(most)
        chances.append(chance_BF.minimum(chances[-1]) if chances else chance_BF)
        # Add sequentially like the host: another order may round differently.
        total_BF = total_BF + chances[-1]
    return score_BF[..., None] * (torch.stack(chances, -1) / total_BF.clamp(min=1.0)[..., None])


def frontier(score_BN: Tensor, count: int) -> Tensor:
    return score_BN.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def prune(
    token_BN: Tensor, parent_BN: Tensor, score_BN: Tensor, belief_BN: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept_BM = frontier(score_BN, count).sort(-1).values
    place_BN = torch.zeros_like(parent_BN).scatter(1, kept_BM, _arange(kept_BM).expand_as(kept_BM))
    parent_BM = parent_BN.gather(1, kept_BM)
    parent_BM = torch.where(parent_BM < 0, parent_BM, place_BN.gather(1, parent_BM.clamp(min=0)))
    token_BM, score_BM, belief_BM = (x.gather(1, kept_BM) for x in (token_BN, score_BN, belief_BN))
    return token_BM, parent_BM, score_BM, belief_BM


def _follow(agrees_BM: Tensor, parent_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Return the path from the root along nodes that agree [B, M]; later entries are their own index."""
    node_M, up_BM = _arange(parent_BM), parent_BM.clamp(min=0)
    on_BM, depth_BM = agrees_BM | (parent_BM < 0), (parent_BM >= 0).long()
    for _ in range(_rounds(parent_BM)):
        on_BM = on_BM & on_BM.gather(1, up_BM)
        depth_BM = depth_BM + depth_BM.gather(1, up_BM)
        up_BM = up_BM.gather(1, up_BM)
    # Nodes off the path write to an extra column, which is cut off.
    to_BM = torch.where(on_BM, depth_BM, len(node_M))
    targets = F.pad(node_M, (0, 1)).expand(len(parent_BM), -1)
    return targets.scatter(1, to_BM, node_M.expand_as(to_BM))[:, :-1], on_BM.sum(-1)


def _accepts(rate_N: Tensor, seed_B: Tensor, position_B: Tensor) -> Tensor:
    """Return for each depth whether a random 64-bit integer is below rate times 2^64.

    int64 cannot hold such an integer, so its 32-bit halves are compared with those of the bound, rounded up.
    Every step is exact.
    """
    depth_N = torch.arange(len(rate_N), device=rate_N.device)
    drawn_BN = splitmix64(splitmix64(seed_B)[:, None] ^ (position_B[:, None] + depth_N))
    high_BN, low_BN = (drawn_BN >> 32) & 0xFFFFFFFF, drawn_BN & 0xFFFFFFFF
    scaled_N = rate_N * 2.0**32
    high_N = scaled_N.floor()
    rest_N = ((scaled_N - high_N) * 2.0**32).ceil().long()
    bound_N = high_N.long()
    return (high_BN < bound_N) | ((high_BN == bound_N) & (low_BN < rest_N))


def _rounds(parent_BM: Tensor) -> int:
    """Return the number of doublings that reach the root from any node."""
    return (parent_BM.shape[1] - 1).bit_length()


def _arange(x_BM: Tensor) -> Tensor:
    return torch.arange(x_BM.shape[1], device=x_BM.device)
