"""An attention layer, composed of the operations' vectorised forms."""

from torch import Tensor

from specdec.kernels.attention.cpu import append, attend
from specdec.kernels.group import Group
from specdec.kernels.norm.cpu import rms_norm
from specdec.kernels.rope.cpu import rotate
from specdec.kernels.self_attention.layer import AttentionLayer, Operations, Rotation, run

OPERATIONS = Operations(rms_norm, rotate, append, attend)


def self_attention(
    projected_TN: Tensor, layer: AttentionLayer, rotation: Rotation | None, pages: Tensor, group: Group
) -> Tensor:
    """Run everything between the projections; mutates `pages` as the append does."""
    return run(OPERATIONS, projected_TN, layer, rotation, pages, group)
