"""The causal convolution, one output at a time; taps are found by walking up the tree."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    memory: RecurrentMemory,
    group: Group,
    *,
    silu: bool = True,
) -> Tensor:
    """Convolve each channel over the last K inputs of a node's own path, round, then apply silu if asked.

    Mutates `memory`: the pending path enters the window. Then certain tokens do; tentative ones leave a
    record, or a snapshot of the window after them.
    """
    rows, width, taps = group.rows, group.width, weight_CK.shape[1]
    if group.path is not None and group.path_length_B is not None:
        fold_window(memory, group.state_B, group.path, group.path_length_B)
    y_TC = torch.empty_like(x_TC)
    for b in range(rows):
        slot = group.state_B[b]
        x_MC = x_TC[b * width : (b + 1) * width]
        known_NC = torch.cat([memory.window_SIC[slot], x_MC])
        for i in range(width):
            tap_K = torch.arange(i, i + taps) if group.tap_BMC is None else group.tap_BMC[b, i].cpu()
            y_TC[b * width + i] = _convolve(known_NC[tap_K], weight_CK, bias_C, silu=silu)
            if group.record is not None:
                memory.input_SRC[group.record.slab_BN[b, i], group.record.index_BN[b, i]] = x_MC[i]
            if group.snapshot_BM is not None:
                memory.window_SIC[group.snapshot_BM[b, i]] = known_NC[tap_K[1:]]
        if not group.tentative:
            memory.window_SIC[slot] = known_NC[len(known_NC) - taps + 1 :]
    return y_TC


def path_conv(
    weight_CK: Tensor,
    bias_C: Tensor | None,
    channels: slice,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
) -> Tensor:
    """Return the convolution's output in some channels for each token of the pending paths [B, P, C].

    Must run before the paths enter the windows. Entries behind a path's end are undefined.
    """
    taps = weight_CK.shape[1]
    y_BPC = memory.input_SRC.new_full((*path.slab_BN.shape, len(weight_CK)), torch.nan)
    for b, slot in enumerate(slot_B):
        known_NC = memory.window_SIC[slot]
        for n in range(int(length_B[b])):
            known_NC = torch.cat([known_NC, memory.input_SRC[path.slab_BN[b, n], path.index_BN[b, n]][None]])
            y_BPC[b, n] = _convolve(known_NC[n : n + taps], weight_CK, bias_C, silu=True)
    return y_BPC[..., channels]


def fold_window(memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
    """Advance each row's window, in place, over the inputs recorded by its path."""
    for b, slot in enumerate(slot_B):
        window_IC = memory.window_SIC[slot].clone()
        for slab, index in zip(path.slab_BN[b, : length_B[b]], path.index_BN[b, : length_B[b]], strict=True):
            window_IC = torch.cat([window_IC, memory.input_SRC[slab, index][None]])[1:]
        memory.window_SIC[slot] = window_IC


def _convolve(input_KC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, *, silu: bool) -> Tensor:
    """Return one output, in the inputs' dtype."""
    dtype = torch.float64 if input_KC.dtype == torch.float64 else torch.float32
    y_C = torch.zeros_like(input_KC[0], dtype=dtype) if bias_C is None else bias_C.to(dtype)
    for j, input_C in enumerate(input_KC):
        y_C = y_C + weight_CK[:, j].to(dtype) * input_C.to(dtype)
    rounded_C = y_C.to(input_KC.dtype)
    return F.silu(rounded_C) if silu else rounded_C
