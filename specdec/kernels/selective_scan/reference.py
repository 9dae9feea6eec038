"""Mamba-1's recurrence one token at a time, with a full state per node.

S_t[k, w] = e^{A[k, w] Δ_t[w]} S_p[k, w] + k_t[k] Δ_t[w] x_t[w], Δ = softplus(dt + bias), p the parent of t;
the output is (S_tᵀ q_t + D x_t) silu(z_t). The decay is a function of Δ and the weight A, so a record stores
Δ in its update field and the key in its decay field. The convolution recomputes x.
"""

import torch
from torch import Tensor

from specdec.kernels.conv.reference import fold_window
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.recurrence.reference import parent_of
from specdec.kernels.selective_scan.layer import SelectiveLayer


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
    """Query the state after each node, add the skip and gate, in the dtype of `x`.

    Mutates `memory`: the pending path, whose inputs are `x_path`, is folded into the states. Then certain
    tokens advance the states; tentative ones leave a record, or a snapshot of the state after them.
    """
    assert group.tentative or group.ancestors_BMM is None, "certain tokens form a chain"
    if group.path is not None and group.path_length_B is not None:
        assert x_path_BPHW is not None
        fold_states(layer, memory, group.state_B, group.path, group.path_length_B, x_path_BPHW)
    out_THW = torch.empty_like(x_THW)
    dtype = memory.state_SHKW.dtype
    for b in range(group.rows):
        committed_HKW = memory.state_SHKW[group.state_B[b]].clone()
        state_HKW: list[Tensor] = []
        for i in range(group.width):
            t, parent = b * group.width + i, parent_of(group, b, i)
            x_HW, step_HW, k_HK = x_THW[t].to(dtype), step_size(dt_THW[t], layer, dtype), k_THK[t].to(dtype)
            parent_HKW = committed_HKW if parent < 0 else state_HKW[parent]
            state_HKW.append(advance(parent_HKW, x_HW, step_HW, k_HK, layer))
            read_HW = torch.einsum("hkw,hk->hw", state_HKW[i], q_THK[t].to(dtype))
            gate_HW = torch.nn.functional.silu(gate_THW[t].to(dtype))
            out_THW[t] = ((read_HW + layer.D_HW.to(dtype) * x_HW) * gate_HW).to(out_THW.dtype)
            if group.record is not None:
                at = group.record.slab_BN[b, i], group.record.index_BN[b, i]
                memory.update_SRHW[at], memory.decay_SRH[at] = step_HW, k_HK
            if group.snapshot_BM is not None:
                memory.state_SHKW[group.snapshot_BM[b, i]] = state_HKW[i]
        if not group.tentative:
            memory.state_SHKW[group.state_B[b]] = state_HKW[-1]
    return out_THW


def fold_selective(
    layer: SelectiveLayer,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
    x_path_BPHW: Tensor,
) -> None:
    """Fold the accepted paths into states and convolution windows, in place."""
    fold_states(layer, memory, slot_B, path, length_B, x_path_BPHW)
    fold_window(memory, slot_B, path, length_B)


def fold_states(
    layer: SelectiveLayer,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
    x_path_BPHW: Tensor,
) -> None:
    """Advance each row's state over its records, one by one."""
    state_SHKW = memory.state_SHKW
    for b, slot in enumerate(slot_B):
        for n in range(int(length_B[b])):
            at, x_HW = (path.slab_BN[b, n], path.index_BN[b, n]), x_path_BPHW[b, n].to(state_SHKW.dtype)
            step_HW, k_HK = memory.update_SRHW[at], memory.decay_SRH[at]
            state_SHKW[slot] = advance(state_SHKW[slot], x_HW, step_HW, k_HK, layer)


def step_size(dt_HW: Tensor, layer: SelectiveLayer, dtype: torch.dtype) -> Tensor:
    """Return Δ, with any leading dimensions."""
    return torch.nn.functional.softplus(dt_HW.to(dtype) + layer.dt_bias_HW.to(dtype))


def advance(state_HKW: Tensor, x_HW: Tensor, step_HW: Tensor, k_HK: Tensor, layer: SelectiveLayer) -> Tensor:
    """Return the state after a token, with any leading dimensions."""
    decay_HKW = torch.exp(layer.A_HKW.to(state_HKW.dtype) * step_HW[..., None, :])
    return decay_HKW * state_HKW + k_HK[..., None] * (step_HW * x_HW)[..., None, :]
