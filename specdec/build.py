"""Build what an engine runs from a model's folder and a configuration."""

import logging
from dataclasses import dataclass
from pathlib import Path

from specdec.config import EngineConfig
from specdec.kernels.linear.cpu import describe
from specdec.kernels.table import load_kernels
from specdec.loop import DecodeLoop
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import open_weights, read_network, stored_dtype
from specdec.models.network import Network
from specdec.resolve import Resolved, resolve
from specdec.scheduler import Scheduler
from specdec.state_slots.arena import Arena
from specdec.text import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model with the memory and the loop that serve it."""

    loop: DecodeLoop
    network: Network
    tokenizer: Tokenizer | None
    settings: Resolved


def build(folder: str | Path, config: EngineConfig) -> Model:
    """Read a checkpoint, settle every "auto", take the memory, and put the loop together."""
    checkpoint = Checkpoint(folder)
    network_spec = read_network(checkpoint)
    tokenizer = load_tokenizer(checkpoint.folder)
    num_bytes = sum(checkpoint.info(name).bytes for name in checkpoint.names())
    settings = resolve(config, network_spec, stored_dtype(checkpoint.config), num_bytes)
    weights = open_weights(checkpoint, network_spec, dtype=settings.dtype, device=settings.device)
    network = Network(
        network_spec,
        weights,
        load_kernels(settings.kernels),
        max_length=settings.max_model_len,
        device=settings.device,
    )
    weights.finish()
    logger.info("kernels: %s; matrices: %s", settings.kernels, describe(settings.dtype, settings.device))
    arena = Arena(settings.layout, settings.memory_bytes, settings.device)
    scheduler = Scheduler(arena, max_running=settings.max_running, chunk_tokens=settings.chunk_tokens)
    return Model(DecodeLoop(network, arena, scheduler, settings.device), network, tokenizer, settings)
