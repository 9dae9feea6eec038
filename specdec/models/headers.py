"""Hold what a config makes of a network against the files' headers, before any memory is taken for it."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from specdec.kernels.table import load_kernels
from specdec.models import spec
from specdec.models.checkpoint import Checkpoint
from specdec.models.eagle import EagleFolder
from specdec.models.eagle_head import EagleHead
from specdec.models.families import open_weights
from specdec.models.network import MTPHead, Network

_CPU = torch.device("cpu")


def check_headers(
    checkpoint: Checkpoint, network: spec.Network, *, mtp: bool, eagle: EagleFolder | None
) -> None:
    """Refuse a config whose sizes are not those of its tensors; `mtp`: with those of the multi-token head.

    The network is built as it is when it is loaded, of tensors without elements: whatever asks for a tensor
    is checked, and there is no second list of them.
    """
    network = replace(network, layers=_unrotated(network.layers), mtp=_unrotated(network.mtp))
    weights = open_weights(
        checkpoint, network, dtype=torch.float32, mtp=mtp, headers_only=True, progress=False
    )
    target = Network(network, weights, load_kernels("reference"), max_length=1, device=_CPU)
    if mtp:
        MTPHead(target, weights)
    weights.finish()
    if eagle:
        (layer,) = _unrotated((eagle.spec.layer,))
        own = eagle.open(dtype=torch.float32, device=_CPU, headers_only=True, progress=False)
        EagleHead(replace(eagle.spec, layer=layer), target, own, None, max_length=1)
        eagle.finish(own)


def _unrotated(layers: Iterable[spec.Layer]) -> tuple[spec.Layer, ...]:
    """Leave out rotations, whose tables are as wide as the config says and no tensor of the files."""
    return tuple(
        replace(layer, mixer=replace(layer.mixer, rope=None))
        if isinstance(layer.mixer, spec.Attention)
        else layer
        for layer in layers
    )
