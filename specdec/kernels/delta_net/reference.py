"""The gated delta net, composed of the operations' references."""

from torch import Tensor

from specdec.kernels.conv.reference import causal_conv, path_conv
from specdec.kernels.delta_net import layer as delta_layer
from specdec.kernels.delta_net.layer import DeltaLayer, Operations, run
from specdec.kernels.gates.reference import delta_gates, l2_normalise
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.norm.reference import gated_norm
from specdec.kernels.recurrence.reference import scan_window

OPERATIONS = Operations(causal_conv, path_conv, l2_normalise, delta_gates, scan_window, gated_norm)


def delta_net(projected_TN: Tensor, layer: DeltaLayer, memory: RecurrentMemory, group: Group) -> Tensor:
    """Run everything between the projections; mutates `memory` as the convolution and the recurrence do."""
    return run(OPERATIONS, projected_TN, layer, memory, group)


def path_keys(
    layer: DeltaLayer, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor
) -> Tensor:
    """Make the keys of the pending paths again, from the inputs that their records hold."""
    return delta_layer.path_keys(OPERATIONS, layer, memory, slot_B, path, length_B)
