"""The recurrence one token at a time, with a full state per node.

S_t = e^{g_t} S_p + k_t u_tᵀ, p the parent of t; o_t = S_tᵀ q_t. Mamba-2 writes u_t = v_t; the gated delta
rule writes the error of its decayed state: u_t = β_t (v_t − e^{g_t} S_pᵀ k_t). If g_t is a vector over the
keys (Kimi's delta attention), e^{g_t} is the diagonal matrix of its exponentials.
"""

import torch
from torch import Tensor

from specdec.kernels.conv.reference import fold_window
from specdec.kernels.group import Group, RecordIds, RecurrentMemory


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
    """Query the state after each node; G key heads serve H heads, and `beta` None means Mamba-2.

    A decay is a scalar per head, or a vector over its keys [T, H, K].

    Mutates `memory`: the pending path, whose keys are `k_path`, is folded into the states. Then certain
    tokens advance the states; tentative ones leave a record, or a snapshot of the state after them.
    """
    assert group.tentative or group.ancestors_BMM is None, "certain tokens form a chain"
    if group.path is not None and group.path_length_B is not None:
        assert k_path_BPGK is not None
        fold_state(memory, group.state_B, group.path, group.path_length_B, k_path_BPGK)
    o_THW = v_THW.new_empty(v_THW.shape, dtype=q_TGK.dtype)
    dtype, heads = memory.state_SHKW.dtype, v_THW.shape[1]
    for b in range(group.rows):
        committed_HKW = memory.state_SHKW[group.state_B[b]].clone()
        state_HKW: list[Tensor] = []
        for i in range(group.width):
            t, parent = b * group.width + i, parent_of(group, b, i)
            q_HK, k_HK = _per_head(q_TGK[t].to(dtype), heads), _per_head(k_TGK[t].to(dtype), heads)
            decay_H = decay_TH[t].to(dtype)
            parent_HKW = committed_HKW if parent < 0 else state_HKW[parent]
            decayed_HKW = _decayed(parent_HKW, decay_H)
            u_HW = v_THW[t].to(dtype)
            if beta_TH is not None:
                u_HW = beta_TH[t].to(dtype)[:, None] * (u_HW - torch.einsum("hkw,hk->hw", decayed_HKW, k_HK))
            state_HKW.append(decayed_HKW + k_HK[:, :, None] * u_HW[:, None, :])
            o_THW[t] = torch.einsum("hkw,hk->hw", state_HKW[i], q_HK).to(o_THW.dtype)
            if group.record is not None:
                at = group.record.slab_BN[b, i], group.record.index_BN[b, i]
                memory.update_SRHW[at], memory.decay_SRH[at] = u_HW, decay_H
            if group.snapshot_BM is not None:
                memory.state_SHKW[group.snapshot_BM[b, i]] = state_HKW[i]
        if not group.tentative:
            memory.state_SHKW[group.state_B[b]] = state_HKW[-1]
    return o_THW


def fold(
    memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor, k_path_BPGK: Tensor | None
) -> None:
    """Fold the accepted paths into states and convolution windows, in place.

    A layer that is only a convolution has no keys.
    """
    if k_path_BPGK is not None:
        fold_state(memory, slot_B, path, length_B, k_path_BPGK)
    fold_window(memory, slot_B, path, length_B)


def fold_state(
    memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor, k_path_BPGK: Tensor
) -> None:
    """Advance each row's state over its records, one by one: S ← e^{g_j} S + k_j u_jᵀ."""
    heads, dtype = memory.state_SHKW.shape[1], memory.state_SHKW.dtype
    for b, slot in enumerate(slot_B):
        for n in range(int(length_B[b])):
            at = path.slab_BN[b, n], path.index_BN[b, n]
            k_HK, u_HW = _per_head(k_path_BPGK[b, n].to(dtype), heads), memory.update_SRHW[at]
            decayed_HKW = _decayed(memory.state_SHKW[slot], memory.decay_SRH[at])
            memory.state_SHKW[slot] = decayed_HKW + k_HK[:, :, None] * u_HW[:, None, :]


def _decayed(state_HKW: Tensor, decay_H: Tensor) -> Tensor:
    """Return e^g S for g of shape [H] or [H, K]."""
    return torch.exp(decay_H).view(len(decay_H), -1, 1) * state_HKW


def parent_of(group: Group, b: int, i: int) -> int:
    """Return the parent, -1 for none; nodes are in topological order, so it is the last ancestor before i."""
    if group.ancestors_BMM is None:
        return i - 1
    return max((j for j in range(i) if group.ancestors_BMM[b, i, j]), default=-1)


def _per_head(x_GK: Tensor, heads: int) -> Tensor:
    return x_GK.repeat_interleave(heads // max(1, len(x_GK)), dim=0)
