"""Mamba-2, composed of the operations' vectorised forms."""

from torch import Tensor

from specdec.kernels.conv.cpu import causal_conv, path_conv
from specdec.kernels.gates.cpu import mamba_step
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.mamba import layer as mamba_layer
from specdec.kernels.mamba.layer import MambaLayer, Operations, run
from specdec.kernels.norm.cpu import gated_norm
from specdec.kernels.recurrence.cpu import scan_window

OPERATIONS = Operations(causal_conv, path_conv, mamba_step, scan_window, gated_norm)


def mamba(projected_TN: Tensor, layer: MambaLayer, memory: RecurrentMemory, group: Group) -> Tensor:
    """Run everything between the projections; mutates `memory` as the convolution and the recurrence do."""
    return run(OPERATIONS, projected_TN, layer, memory, group)


def mamba_keys(
    layer: MambaLayer, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor
) -> Tensor:
    """Make the keys of the pending paths again, from the inputs that their records hold."""
    return mamba_layer.mamba_keys(OPERATIONS, layer, memory, slot_B, path, length_B)
