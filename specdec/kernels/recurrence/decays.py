"""Decays along a window's paths: a scalar per head, or a vector over its keys.

Both classes have the same methods. G is the sum from the window's root; e^G of a vector scales the state's
rows. Decays between two nodes are summed from the tokens between them: the difference of two sums from the
root is equal but loses digits after a strong decay above both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.recurrence.states import States, Update


class HeadDecays(NamedTuple):
    """Scalar decays per head, which factor out of sums over keys."""

    log_ZM: Tensor
    """G."""
    decay_ZMM: Tensor
    """e^{G_i - G_j} if j is an ancestor of i or i itself, else 0."""

    def weigh(self, reader_YXK: Tensor, k_YMK: Tensor) -> Tensor:
        """Return e^{G_i - G_j} x_i·k_j for C readers per node [Z, C, M, M], grouped by key head."""
        groups, width = k_YMK.shape[:2]
        inner = torch.bmm(reader_YXK, k_YMK.mT).view(groups, 1, -1, width, width)
        return (inner * self.decay_ZMM.view(groups, -1, 1, width, width)).flatten(0, 1)

    def read(self, states: States, reader_YXK: Tensor) -> Tensor:
        """Return e^{G_i} x_i S [Z, C, M, W]."""
        heads, width = self.log_ZM.shape
        read_ZXW = states.read(per_head(reader_YXK, heads))
        return read_ZXW.view(heads, -1, width, read_ZXW.shape[2]).mul_(self.log_ZM.exp()[:, None, :, None])

    def to_end(self, k_ZMK: Tensor, u_ZMW: Tensor) -> Update:
        """Return the chain's update of the state before it."""
        weighted_ZMW = u_ZMW * self.decay_ZMM[:, -1, :, None]
        return Update(self.log_ZM[:, -1, None, None].exp(), k_ZMK.mT, weighted_ZMW)


class KeyDecays(NamedTuple):
    """Decay vectors over the keys: each pair of nodes has its own inside the sum over keys."""

    log_ZMK: Tensor
    decay_ZMMK: Tensor

    def weigh(self, reader_YXK: Tensor, k_YMK: Tensor) -> Tensor:
        heads, width, _, size = self.decay_ZMMK.shape
        reader_ZMCK = per_head(reader_YXK, heads).view(heads, -1, width, size).transpose(1, 2)
        found_ZMMK = self.decay_ZMMK * per_head(k_YMK, heads)[:, None]
        return torch.matmul(reader_ZMCK, found_ZMMK.mT).transpose(1, 2)

    def read(self, states: States, reader_YXK: Tensor) -> Tensor:
        heads, width, size = self.log_ZMK.shape
        reader_ZCMK = per_head(reader_YXK, heads).view(heads, -1, width, size)
        read_ZXW = states.read((reader_ZCMK * self.log_ZMK.exp()[:, None]).flatten(1, 2))
        return read_ZXW.view(heads, -1, width, read_ZXW.shape[2])

    def to_end(self, k_ZMK: Tensor, u_ZMW: Tensor) -> Update:
        return Update(self.log_ZMK[:, -1, :, None].exp(), (k_ZMK * self.decay_ZMMK[:, -1]).mT, u_ZMW)


def along_paths(decay_ZM: Tensor, ancestors_BMM: Tensor | None) -> HeadDecays | KeyDecays:
    """Sum the nodes' own log-decays [Z, M] or [Z, M, K] along the paths of a tree, or of a chain (None)."""
    return _of_heads(decay_ZM, ancestors_BMM) if decay_ZM.dim() == 2 else _of_keys(decay_ZM, ancestors_BMM)


def of_path(decay_ZN: Tensor, k_ZNK: Tensor, u_ZNW: Tensor) -> Update:
    """Return the state update that commits a path.

    S ← e^{G} S + Σ_j e^{G − G_j} k_j u_jᵀ, with exponents summed from the path's end.
    """
    padded_ZE = torch.cat([decay_ZN, torch.zeros_like(decay_ZN[:, :1])], dim=1)
    factor_ZE = padded_ZE.flip(1).cumsum(1).exp_().flip(1)
    if decay_ZN.dim() == 2:
        return Update(factor_ZE[:, :1, None], k_ZNK.mT, u_ZNW * factor_ZE[:, 1:, None])
    return Update(factor_ZE[:, 0, :, None], (k_ZNK * factor_ZE[:, 1:]).mT, u_ZNW)


def per_head(x_Y: Tensor, heads: int) -> Tensor:
    """Repeat each of Y entries for each head of its key head."""
    return x_Y if len(x_Y) == heads else x_Y.repeat_interleave(heads // len(x_Y), dim=0)


def _of_heads(decay_ZM: Tensor, ancestors_BMM: Tensor | None) -> HeadDecays:
    heads, width = decay_ZM.shape
    if ancestors_BMM is None:
        between_ZMM = decay_ZM[..., None].expand(-1, -1, width).tril(-1).cumsum(1)
        return HeadDecays(decay_ZM.cumsum(1), between_ZMM.exp_().tril_())
    above_BMM = ancestors_BMM.to(decay_ZM.dtype)
    above_ZMM = per_head(above_BMM, heads)
    part_ZMM = decay_ZM[:, None] * above_ZMM
    between_ZMM = torch.bmm(part_ZMM, per_head(above_BMM.tril(-1), heads))
    return HeadDecays(part_ZMM.sum(-1), between_ZMM.exp_().mul_(above_ZMM))


def _of_keys(decay_ZMK: Tensor, ancestors_BMM: Tensor | None) -> KeyDecays:
    heads, width, size = decay_ZMK.shape
    if ancestors_BMM is None:
        over_MM = torch.ones(width, width, dtype=torch.bool, device=decay_ZMK.device).tril()
        strict_ZMMK = torch.where(over_MM.tril(-1)[..., None], decay_ZMK[:, :, None], 0)
        return KeyDecays(decay_ZMK.cumsum(1), strict_ZMMK.cumsum(1).exp_().mul_(over_MM[..., None]))
    rows = len(ancestors_BMM)
    # Node t is between j and i if it is i or an ancestor of i, and strictly below j.
    step_BMMM = ancestors_BMM[:, :, None] & ancestors_BMM.tril(-1).mT[:, None]
    row_BMN = decay_ZMK.view(rows, -1, width, size).transpose(1, 2).flatten(2)
    between_BMN = torch.bmm(step_BMMM.flatten(1, 2).to(row_BMN.dtype), row_BMN)
    between_BHMMK = between_BMN.view(rows, width, width, -1, size).permute(0, 3, 1, 2, 4)
    over_BMM = ancestors_BMM.to(row_BMN.dtype)
    decay_BHMMK = between_BHMMK.exp().mul_(over_BMM[:, None, ..., None])
    log_BMN = torch.bmm(over_BMM, row_BMN)
    log_ZMK = log_BMN.view(rows, width, -1, size).transpose(1, 2).reshape(heads, width, size)
    return KeyDecays(log_ZMK, decay_BHMMK.reshape(heads, width, width, size))
