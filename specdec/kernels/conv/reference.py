"""The causal convolution, one output at a time; every input of a tap is looked up by walking back."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory


def causal_conv(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, memory: RecurrentMemory, group: Group
) -> Tensor:
    """Convolve each channel over the last K inputs of a node's own path, then silu.

    Mutates `memory`: the pending path enters the window; then the tokens do, if they are certain, or become
    records, if they may be taken back.
    """
    rows, width, taps = group.rows, group.width, weight_CK.shape[1]
    if group.path is not None and group.path_length_B is not None:
        fold_window(memory, group.state_B, group.path, group.path_length_B)
    dtype = torch.float64 if x_TC.dtype == torch.float64 else torch.float32
    weight_CK = weight_CK.to(dtype)
    y_TC = torch.empty_like(x_TC)
    for b in range(rows):
        slot = group.state_B[b]
        x_MC = x_TC[b * width : (b + 1) * width]
        known_NC = torch.cat([memory.window_SIC[slot], x_MC])
        for i in range(width):
            tap_K = torch.arange(i, i + taps) if group.tap_BMC is None else group.tap_BMC[b, i].cpu()
            y_C = torch.zeros_like(known_NC[0], dtype=dtype) if bias_C is None else bias_C.to(dtype)
            for j in range(taps):
                y_C = y_C + weight_CK[:, j] * known_NC[tap_K[j]].to(dtype)
            y_TC[b * width + i] = F.silu(y_C).to(x_TC.dtype)
        if group.record is None:
            memory.window_SIC[slot] = known_NC[len(known_NC) - taps + 1 :]
            continue
        for i in range(width):
            memory.input_SRC[group.record.slab_BN[b, i], group.record.index_BN[b, i]] = x_MC[i]
    return y_TC


def fold_window(memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
    """Move each row's window on, in place, over the inputs that its path recorded."""
    for b, slot in enumerate(slot_B):
        window_IC = memory.window_SIC[slot].clone()
        for slab, index in zip(path.slab_BN[b, : length_B[b]], path.index_BN[b, : length_B[b]], strict=True):
            window_IC = torch.cat([window_IC, memory.input_SRC[slab, index][None]])[1:]
        memory.window_SIC[slot] = window_IC
