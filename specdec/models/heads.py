"""Draft heads of a network, found and described but not loaded yet."""

import logging
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specdec.config.engine import EngineConfig
from specdec.errors import CheckpointError, ConfigError
from specdec.models import spec
from specdec.models.block import is_block, read_block
from specdec.models.block_head import BlockHead
from specdec.models.checkpoint import Checkpoint
from specdec.models.checkpoint_weights import CheckpointWeights
from specdec.models.eagle import read_eagle
from specdec.models.eagle_head import EagleHead
from specdec.models.fields import Fields
from specdec.models.files import HEAD_FOLDERS
from specdec.models.formats import WeightFormat
from specdec.models.head_folder import HeadFolder
from specdec.models.network import MTPHead, Network
from specdec.models.weights import Weights

logger = logging.getLogger(__name__)

Head = MTPHead | EagleHead | BlockHead


class HeadSource(Protocol):
    """A head's layers and tensor source."""

    @property
    def layers(self) -> tuple[spec.LayerSpec, ...]:
        """Return the layers with KV in the arena, after the target's."""
        ...

    @property
    def deepest(self) -> int | None:
        """Return the maximum draft depth, or None if it is unlimited."""
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
    deepest: None = None

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
    head_weights = source.open(
        dtype=dtype, device=device, quantize=quantize, headers_only=headers_only, progress=progress
    )
    head = source.fill(target, head_weights or weights, max_length=max_length)
    if head_weights:
        source.finish(head_weights)
    return head


def find_mtp(folder: Path | None, network: spec.NetworkSpec, config: EngineConfig) -> OwnHead | None:
    """Return the multi-token head in the model's own checkpoint, if any."""
    return OwnHead(network.mtp) if network.mtp else None


def find_eagle(folder: Path | None, network: spec.NetworkSpec, config: EngineConfig) -> HeadFolder | None:
    """Return the EAGLE head of draft_model, or with draft eagle the one in the model's folder."""
    return _find(folder, network, config, block=False)


def find_block(folder: Path | None, network: spec.NetworkSpec, config: EngineConfig) -> HeadFolder | None:
    """Return the block head of draft_model, or with draft block the one in the model's folder."""
    return _find(folder, network, config, block=True)


def _find(
    folder: Path | None, network: spec.NetworkSpec, config: EngineConfig, *, block: bool
) -> HeadFolder | None:
    if folder is None:
        if config.draft_model is not None:
            raise ConfigError(
                "draft_model: random weights have no draft head; leave it out.", field="draft_model"
            )
        return None
    path = find_head(folder, config.draft, config.draft_model)
    if path is None or kind_of(path) != ("block" if block else "eagle"):
        return None
    return read_head(path, network, Fields(Checkpoint(folder).config).strings("architectures") or ())


def find_head(model: str | Path, draft: str, draft_model: str | None) -> Path | None:
    """Return the draft head's folder: as configured, or for this drafter also in the model's folder."""
    if draft_model is not None:
        return Path(draft_model)
    candidates = (Path(model) / name for name, drafter in HEAD_FOLDERS.items() if drafter == draft)
    return next((folder for folder in candidates if os.path.isdir(folder)), None)


def kind_of(folder: Path) -> str:
    """Return the drafter that a head's folder is for."""
    return "block" if is_block(_open(folder)) else "eagle"


def read_head(folder: Path, target: spec.NetworkSpec, architectures: Sequence[str] = ()) -> HeadFolder:
    """Describe the head in a folder; every error begins with draft_model.

    Warn if the head names other architectures of its target than these.
    """
    checkpoint = _open(folder)
    try:
        head_spec = (read_block if is_block(checkpoint) else read_eagle)(checkpoint, target)
        named = Fields(checkpoint.config).within("speculators_config").within("verifier")
        verifiers = named.strings("architectures") or ()
    except CheckpointError as error:
        raise CheckpointError(f"draft_model: {error}", field=error.field) from error
    if architectures and verifiers and not set(architectures) & set(verifiers):
        logger.warning(
            "draft_model: the head was trained for %s, and this model is %s; few of its drafts may be "
            "accepted",
            ", ".join(verifiers),
            ", ".join(architectures),
        )
    return head_spec


def _open(folder: Path) -> Checkpoint:
    try:
        return Checkpoint(folder)
    except CheckpointError as error:
        field = "draft_model" if error.field == "model" else error.field
        raise CheckpointError(f"draft_model: {error}", field=field) from error
