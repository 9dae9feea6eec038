"""Build what an engine runs from a model's folder and a configuration."""

import logging
from dataclasses import dataclass
from pathlib import Path

from specdec.config import EngineConfig
from specdec.draft.drafter import Drafter
from specdec.draft.head import HeadDrafter
from specdec.draft.lookup import Lookup
from specdec.draft.ngram import NgramDrafter
from specdec.draft.policy import Policy
from specdec.draft.suffix import SuffixDrafter
from specdec.kernels.linear.cpu import describe
from specdec.kernels.table import load_kernels
from specdec.loop import DecodeLoop
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import open_weights, read_network, stored_dtype
from specdec.models.network import MTPHead, Network
from specdec.resolve import Resolved, resolve
from specdec.scheduler import Scheduler
from specdec.speculation import Speculation
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import BACKINGS
from specdec.text import Tokenizer, load_tokenizer
from specdec.warmup import warm_up

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
    wants_head = "mtp" in settings.drafters
    weights = open_weights(
        checkpoint, network_spec, dtype=settings.dtype, device=settings.device, mtp=wants_head
    )
    network = Network(
        network_spec,
        weights,
        load_kernels(settings.kernels),
        max_length=settings.max_model_len,
        device=settings.device,
    )
    head = MTPHead(network, weights) if wants_head else None
    weights.finish()
    logger.info("kernels: %s; matrices: %s", settings.kernels, describe(settings.dtype, settings.device))
    loop = assemble(network, head, settings)
    return Model(loop, network, tokenizer, settings)


def assemble(network: Network, head: MTPHead | None, settings: Resolved) -> DecodeLoop:
    """Put the loop together around a loaded network, and let it learn what its steps cost."""
    arena = Arena(settings.layout, settings.memory_bytes, settings.device)
    scheduler = Scheduler(arena, max_running=settings.max_running, chunk_tokens=settings.chunk_tokens)
    policy = Policy(settings.bounds, adaptive=settings.adaptive)
    speculation = Speculation(
        policy,
        BACKINGS[settings.slots](arena),
        scheduler,
        network.kernels,
        synthetic=settings.synthetic,
    )
    for name in settings.drafters:
        speculation.enlist(_drafter(name, head, arena, speculation, settings.chunk_tokens))
    loop = DecodeLoop(network, arena, scheduler, speculation, settings.device)
    if settings.drafters and settings.adaptive:
        warm_up(loop, settings.max_model_len)
    return loop


def _drafter(
    name: str, head: MTPHead | None, arena: Arena, speculation: Speculation, chunk_tokens: int
) -> Drafter:
    match name:
        case "mtp":
            assert head is not None
            return HeadDrafter(head, arena, speculation.rank, arena.data.device, chunk_tokens)
        case "ngram":
            return Lookup(NgramDrafter())
        case "suffix":
            return Lookup(SuffixDrafter())
    raise AssertionError(name)
