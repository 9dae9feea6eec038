"""Check a config's network against the files' headers, before allocating memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.table import load_kernels, replaced
from specdec.models import spec
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import open_weights
from specdec.models.heads import HeadSource, load_head
from specdec.models.network import Network

_CPU = torch.device("cpu")


def check_headers(checkpoint: Checkpoint, network: spec.NetworkSpec, head: HeadSource | None) -> None:
    """Refuse a config whose sizes do not match its tensors or the draft head's.

    The network is built as at load time, but from tensors without elements. So every tensor it uses is
    checked without a second list of them.
    """
    kernels = replaced(load_kernels("reference"), rope_table=_no_table)
    beside = head is not None and head.checkpoint is None
    weights = open_weights(
        checkpoint, network, dtype=torch.float32, mtp=beside, headers_only=True, progress=False
    )
    target = Network(network, weights, kernels, max_length=1, device=_CPU)
    if head:
        load_head(
            head,
            target,
            weights,
            max_length=1,
            dtype=torch.float32,
            device=_CPU,
            headers_only=True,
            progress=False,
        )
    weights.finish()


def _no_table(
    position_T: Tensor, dim: int, theta: float, scaling: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Skip the rotary table, whose size is not checked against any tensor."""
    return torch.empty(0), torch.empty(0)
