"""The summation orders of products of bfloat16 pairs. Each product is exact; each sum rounds once."""

import torch
from torch import Tensor


def by_pairs(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Add pair by pair, the second entry first, as vector units do on every processor."""
    sum_TN = torch.zeros(len(x_TD), len(weight_ND))
    for k in range(x_TD.shape[1]):
        sum_TN = _add(sum_TN, x_TD, weight_ND, k ^ 1)
    return sum_TN


def by_tiles(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Add sixteen pairs at a time: the sum of their first entries, plus that of their second ones."""
    sum_TN = torch.zeros(len(x_TD), len(weight_ND))
    for block in range(0, x_TD.shape[1], 32):
        entries = [torch.zeros_like(sum_TN), torch.zeros_like(sum_TN)]
        for k in range(block, block + 32):
            entries[k % 2] = _add(entries[k % 2], x_TD, weight_ND, k)
        sum_TN += entries[0] + entries[1]
    return sum_TN


def by_matrix_units(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Add as on CPUs with matrix units; inputs that fill no tiles are multiplied by vector units."""
    return (by_pairs if x_TD.shape[1] % 32 else by_tiles)(x_TD, weight_ND)


def _add(sum_TN: Tensor, x_TD: Tensor, weight_ND: Tensor, k: int) -> Tensor:
    return (sum_TN.double() + x_TD[:, k, None].double() * weight_ND[:, k].double()).float()
