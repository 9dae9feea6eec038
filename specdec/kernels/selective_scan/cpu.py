"""Mamba-1's recurrence, one node of all rows at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.conv.cpu import fold_window
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.rows import cast, find_parents, locate_records, trim_path, write
from specdec.kernels.selective_scan.layer import SelectiveLayer
from specdec.kernels.selective_scan.reference import advance, step_size


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
    assert group.tentative or group.ancestors_BMM is None, "certain tokens form a chain"
    dtype, rows, width = memory.state_SHKW.dtype, group.rows, group.width
    state_BHKW = memory.state_SHKW[group.state_B]
    if group.path is not None and group.path_length_B is not None:
        assert x_path_BPHW is not None
        state_BHKW = _folded(state_BHKW, layer, memory, group.path, group.path_length_B, x_path_BPHW)
        memory.state_SHKW[group.state_B] = state_BHKW
    step_THW = step_size(dt_THW, layer, dtype)
    x_BMHW, step_BMHW, k_BMHK, q_BMHK = (
        cast(x_T, dtype).reshape(rows, width, *x_T.shape[1:]) for x_T in (x_THW, step_THW, k_THK, q_THK)
    )
    read, before, row_B = [], [state_BHKW], torch.arange(rows, device=state_BHKW.device)
    parent_BM = None if group.ancestors_BMM is None else find_parents(group.ancestors_BMM)
    for i in range(width):
        if parent_BM is not None:
            state_BHKW = torch.stack(before, dim=1)[row_B, parent_BM[:, i]]
        state_BHKW = advance(state_BHKW, x_BMHW[:, i], step_BMHW[:, i], k_BMHK[:, i], layer)
        read.append(torch.einsum("bhkw,bhk->bhw", state_BHKW, q_BMHK[:, i]))
        if parent_BM is not None:
            before.append(state_BHKW)
        if group.snapshot_BM is not None:
            memory.state_SHKW[group.snapshot_BM[:, i]] = state_BHKW
    if group.record is not None:
        at = locate_records(group.record)
        write(memory.update_SRHW, at, step_THW)
        write(memory.decay_SRH, at, k_THK)
    if not group.tentative:
        memory.state_SHKW[group.state_B] = state_BHKW
    read_THW = torch.stack(read, dim=1).flatten(0, 1)
    skipped_THW = read_THW + cast(layer.D_HW, dtype) * cast(x_THW, dtype)
    return cast(skipped_THW * F.silu(cast(gate_THW, dtype)), x_THW.dtype)


def fold_selective(
    layer: SelectiveLayer,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
    x_path_BPHW: Tensor,
) -> None:
    state_BHKW = memory.state_SHKW[slot_B]
    memory.state_SHKW[slot_B] = _folded(state_BHKW, layer, memory, path, length_B, x_path_BPHW)
    fold_window(memory, slot_B, path, length_B)


def _folded(
    state_BHKW: Tensor,
    layer: SelectiveLayer,
    memory: RecurrentMemory,
    path: RecordIds,
    length_B: Tensor,
    x_path_BPHW: Tensor,
) -> Tensor:
    """Return the states after their paths; entries behind a path's end are undefined."""
    path, _ = trim_path(path, length_B)
    for n in range(path.slab_BN.shape[1]):
        at, x_BHW = (path.slab_BN[:, n], path.index_BN[:, n]), cast(x_path_BPHW[:, n], state_BHKW.dtype)
        after_BHKW = advance(state_BHKW, x_BHW, memory.update_SRHW[at], memory.decay_SRH[at], layer)
        state_BHKW = torch.where((n < length_B)[:, None, None, None], after_BHKW, state_BHKW)
    return state_BHKW
