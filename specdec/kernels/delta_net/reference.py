"""The gated delta net, composed of the operations' references."""

from torch import Tensor

from specdec.kernels.conv.reference import causal_conv
from specdec.kernels.delta_net.layer import DeltaLayer, Operations, run
from specdec.kernels.gates.reference import delta_gates, l2_normalise
from specdec.kernels.group import Group, RecurrentMemory
from specdec.kernels.norm.reference import gated_norm
from specdec.kernels.recurrence.reference import recur

OPERATIONS = Operations(causal_conv, l2_normalise, delta_gates, recur, gated_norm)


def delta_net(projected_TN: Tensor, layer: DeltaLayer, memory: RecurrentMemory, group: Group) -> Tensor:
    """Run everything between the projections; mutates `memory` as the convolution and the recurrence do."""
    return run(OPERATIONS, projected_TN, layer, memory, group)
