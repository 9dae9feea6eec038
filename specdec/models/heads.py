"""Draft heads of a network, found and described but not loaded yet."""

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
from specdec.models.fields import Fields
from specdec.models.formats import WeightFormat
from specdec.models.network import MTPHead, Network
from specdec.models.weights import Weights

Head = MTPHead | EagleHead


class HeadSource(Protocol):
    """A head's layers and tensor source."""

    @property
    def layers(self) -> tuple[spec.LayerSpec, ...]:
        """Return the layers with KV in the arena, after the target's."""
        ...

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Return the head's own checkpoint; None: its tensors are in the target's."""
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
        """Open the head's own checkpoint by our names, or return None."""
        ...

    def fill(self, target: Network, weights: Weights, *, max_length: int) -> Head:
        """Build the head from its own tensors, or else from the target's."""
        ...

    def finish(self, weights: CheckpointWeights) -> None:
        """Check that the head's own checkpoint had no missing or unused tensors."""
        ...


@dataclass(frozen=True, slots=True)
class OwnHead:
    """The multi-token head in a model's own checkpoint."""

    layers: tuple[spec.LayerSpec, ...]
    checkpoint: None = None

    def open(self, **_: object) -> None:
        """Return None: the target's tensors are open."""

    def fill(self, target: Network, weights: Weights, *, max_length: int) -> MTPHead:
        return MTPHead(target, weights)

    def finish(self, weights: CheckpointWeights) -> None:
        """Do nothing: the target finishes its own tensors."""


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
    """Load a head for its target, while the target's weights are open."""
    own = source.open(
        dtype=dtype, device=device, quantize=quantize, headers_only=headers_only, progress=progress
    )
    head = source.fill(target, own or weights, max_length=max_length)
    if own:
        source.finish(own)
    return head


def find_mtp(folder: Path | None, network: spec.NetworkSpec, config: EngineConfig) -> OwnHead | None:
    """Return the multi-token head in the model's own checkpoint, if any."""
    return OwnHead(network.mtp) if network.mtp else None


def find_eagle(folder: Path | None, network: spec.NetworkSpec, config: EngineConfig) -> EagleFolder | None:
    """Return the EAGLE head of draft_model, or with draft eagle the one in the model's folder."""
    if folder is None:
        if config.draft_model is not None:
            raise ConfigError(
                "draft_model: random weights have no draft head; leave it out.",
                field="draft_model",
            )
        return None
    place = find_head(folder, config.draft, config.draft_model)
    if place is None:
        return None
    return read_head(place, network, Fields(Checkpoint(folder).config).strings("architectures") or ())
