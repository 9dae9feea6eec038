"""Heads that draft for a network, as they are found beside its weights: described, and not read yet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError
from specdec.models import spec
from specdec.models.checkpoint import Checkpoint
from specdec.models.checkpoint_weights import CheckpointWeights
from specdec.models.eagle import EagleFolder, find_head, read_head
from specdec.models.eagle_head import EagleHead
from specdec.models.formats import WeightFormat
from specdec.models.network import MTPHead, Network
from specdec.models.weights import Weights

Head = MTPHead | EagleHead


class HeadSource(Protocol):
    """A head's layers, and where its tensors lie."""

    @property
    def layers(self) -> tuple[spec.Layer, ...]:
        """Return what the arena keeps keys and values for, behind the target's."""
        ...

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Return the folder of its own; None: its tensors lie among the target's."""
        ...

    def open(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantize: WeightFormat | None = None,
        headers_only: bool = False,
        progress: bool | None = None,
    ) -> CheckpointWeights | None:
        """Open the tensors of its own folder by our names, if it has one."""
        ...

    def fill(self, target: Network, weights: Weights, *, max_length: int) -> Head:
        """Build the head from its own folder's tensors, or else from the target's."""
        ...

    def finish(self, weights: CheckpointWeights) -> None:
        """Check that nothing of its own folder was missing or left."""
        ...


@dataclass(frozen=True, slots=True)
class OwnHead:
    """The multi-token head that a model's checkpoint holds beside its network."""

    layers: tuple[spec.Layer, ...]
    checkpoint: None = None

    def open(self, **_: object) -> None:
        """Open nothing: the target's tensors are open."""

    def fill(self, target: Network, weights: Weights, *, max_length: int) -> MTPHead:
        return MTPHead(target, weights)

    def finish(self, weights: CheckpointWeights) -> None:
        """Leave it to the target, which opened them."""


def load_head(
    source: HeadSource,
    target: Network,
    weights: Weights,
    *,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    quantize: WeightFormat | None = None,
    headers_only: bool = False,
    progress: bool | None = None,
) -> Head:
    """Read a head beside its target, whose own weights are still open."""
    own = source.open(
        dtype=dtype, device=device, quantize=quantize, headers_only=headers_only, progress=progress
    )
    head = source.fill(target, own or weights, max_length=max_length)
    if own:
        source.finish(own)
    return head


def find_mtp(folder: Path | None, network: spec.Network, config: EngineConfig) -> OwnHead | None:
    """Find the multi-token head that the model's own checkpoint holds."""
    return OwnHead(network.mtp) if network.mtp else None


def find_eagle(folder: Path | None, network: spec.Network, config: EngineConfig) -> EagleFolder | None:
    """Find the EAGLE head that draft_model names, or, if it is asked for by name, in the model's folder."""
    if folder is None:
        if config.draft_model is not None:
            raise ConfigError(
                "draft_model: weights that are drawn have no head's beside them; leave it out.",
                field="draft_model",
            )
        return None
    place = find_head(folder, config.draft, config.draft_model)
    return read_head(place, network) if place else None
