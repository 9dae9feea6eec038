"""Mamba-1's recurrence over a narrow window, in C."""

import torch
from torch import Tensor

from specdec.kernels.conv import cpu as conv
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.native.call import function, has_room, ids, pointer, records_of, serves, strided
from specdec.kernels.native.compiled import MOST
from specdec.kernels.native.signatures import SUFFIX
from specdec.kernels.selective_scan import cpu
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
    """Run the recurrence over narrow windows of any number of rows, in float32."""
    inputs, dtype, state = (x_THW, gate_THW, dt_THW), x_THW.dtype, memory.state_SHKW
    heads, width = x_THW.shape[1:]
    dense = all(x.stride()[1:] == (width, 1) and x.dtype == dtype for x in inputs)
    if not serves(x_THW) or state.dtype != torch.float32 or not dense or not has_room(group):
        return cpu.selective_scan(x_THW, gate_THW, dt_THW, k_THK, q_THK, layer, memory, group, x_path_BPHW)
    out_THW = torch.empty(x_THW.shape, dtype=dtype)
    k_THK, q_THK = k_THK.float().contiguous(), q_THK.float().contiguous()
    if x_path_BPHW is not None:
        assert x_path_BPHW.dtype == dtype
        x_path_BPHW = x_path_BPHW.contiguous()
    function("selective_scan", dtype)(
        *(field for x in inputs for field in strided(x, 2)),
        *map(pointer, (k_THK, q_THK, layer.A_HKW, layer.D_HW, layer.dt_bias_HW, out_THW)),
        *(group.rows, group.width, heads, k_THK.shape[2], width),
        *(*strided(state, 3), pointer(group.state_B), records_of(memory)),
        pointer(x_path_BPHW),
        *ids(group),
        pointer(group.ancestors_BMM),
    )
    return out_THW


def fold_selective(
    layer: SelectiveLayer,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
    x_path_BPHW: Tensor,
) -> None:
    """Fold paths into states and windows, in place, by running a window without tokens."""
    state, (rows, longest), dtype = memory.state_SHKW, path.slab_BN.shape, x_path_BPHW.dtype
    if dtype not in SUFFIX or state.dtype != torch.float32 or not state.is_cpu or longest > MOST:
        return cpu.fold_selective(layer, memory, slot_B, path, length_B, x_path_BPHW)
    conv.fold_window(memory, slot_B, path, length_B)
    x_path_BPHW, length_B = x_path_BPHW.contiguous(), length_B.contiguous()
    path = RecordIds(*(x.contiguous() for x in path))
    function("selective_scan", dtype)(
        *(None, 0) * 3,
        *(None, None, *map(pointer, (layer.A_HKW, layer.D_HW, layer.dt_bias_HW)), None),
        *(rows, 0, *state.shape[1:]),
        *(*strided(state, 3), pointer(slot_B), records_of(memory)),
        pointer(x_path_BPHW),
        *map(pointer, (*path, length_B)),
        longest,
        *[None] * 4,
    )
