"""Fit a named shape on a device: weights drawn there, and the number of rows beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.bench.random_model import shape_config
from specdec.config.engine import EngineConfig
from specdec.core.device.extent import Extent
from specdec.errors import CapacityError
from specdec.models import families
from specdec.setup.devices import free_memory
from specdec.setup.drafters import has_copy, has_head
from specdec.setup.resolve import resolve
from specdec.setup.settings import Resolved
from tools.bench.time_model import TimeModel

ARENA_SHARE = 0.8
"""The arena's share of the memory left by the weights; the rest is for activations, logits and CUDA
graphs."""
ANYTHING = 1 << 50
"""More memory than any device has, to resolve settings independently of the device."""


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """A shape's memory on one device, before anything is allocated."""

    name: str
    model: TimeModel
    stored: torch.dtype
    settings: Resolved
    """Settings resolved with unlimited memory."""
    weight_bytes: int
    arena_bytes: int
    """Bytes for each arena: one with drafts, one without."""

    @property
    def stored_bytes(self) -> int:
        """Return the size of a checkpoint in its own dtype."""
        held = (*self.model.footprint.target, *self.model.footprint.mtp)
        return sum(p.count for p in held) * self.stored.itemsize

    def row_bytes(self, tokens: int, slots: str) -> int:
        """Return the bytes of a row of this many tokens, with its window's slots (and the path's records)."""
        layout, bounds = self.settings.layout, self.settings.bounds
        own = layout.sequence_bytes(tokens)
        if not self.settings.drafters:
            return own
        extent = Extent.of(1, bounds, looks=True)
        own += layout.blocks_for(extent.ahead + layout.block_tokens) * layout.block_bytes
        own += layout.states_per_slab * layout.slab_bytes if has_copy(self.settings.drafters) else 0
        if slots == "snapshot":
            return own + extent.snapshots * layout.states_per_slab * layout.slab_bytes
        return own + extent.records * layout.record_bytes

    def rows(self, tokens: int, slots: str) -> int:
        """Return how many rows of this many tokens an arena holds."""
        return max(self.arena_bytes - 4 * self.settings.layout.slab_bytes, 0) // self.row_bytes(tokens, slots)

    def memory_for(self, rows: int, tokens: int) -> int:
        """Return the arena size for this many rows, including partly used slabs."""
        layout = self.settings.layout
        needed = (
            (rows * self.row_bytes(tokens, self.settings.config.slots) + 4 * layout.slab_bytes) * 21 // 20
        )
        return min(max(needed, 6 * layout.slab_bytes), self.arena_bytes)


def fit(name: str, config: EngineConfig) -> MemoryFit:
    """Describe a named shape on the requested device; refuse one whose weights are too large."""
    raw = shape_config(name)
    network, stored = families.network(raw), families.stored_dtype(raw)
    count = TimeModel(network, stored).footprint
    stored_bytes = sum(p.count for p in (*count.target, *count.mtp)) * stored.itemsize
    roomy = EngineConfig.of(config, {"memory_bytes": ANYTHING})
    settings = resolve(roomy, network, stored, stored_bytes)
    copied = has_copy(settings.drafters)
    model = TimeModel(network, settings.dtype, quantize=settings.weight_format, copied=copied)
    weight_bytes = model.weight_bytes(mtp=has_head(settings.drafters))
    # Drawing the last matrix needs a second copy of it beside all other weights.
    largest = max(p.count for p in model.footprint.target) * settings.dtype.itemsize
    free = free_memory(settings.device)
    if weight_bytes + largest > free:
        form = "int8" if settings.device.type == "cpu" else "fp8"
        narrower = "" if settings.quantize else f", or try --quantize {form}"
        raise CapacityError(
            f"shape: {name} needs {weight_bytes:,} bytes for its weights and {largest:,} to draw them, and "
            f"{settings.device} has {free:,} free; choose a smaller shape{narrower}.",
            field="shape",
        )
    arenas = 2 if settings.drafters else 1
    spare = int(ARENA_SHARE * (free - weight_bytes - largest)) // arenas
    if config.memory_bytes is not None:
        spare = min(spare, config.memory_bytes)
    return MemoryFit(name, model, stored, settings, weight_bytes, spare)


def fitting(found: MemoryFit, batches: Sequence[int], tokens: int) -> list[int]:
    """Return the batches that fit the arena; raise if there are none."""
    most = found.rows(tokens, found.settings.config.slots)
    kept = [batch for batch in batches if batch <= most]
    if not kept:
        raise CapacityError(
            f"batch: beside {found.weight_bytes:,} bytes of weights of {found.name}, {most} rows of {tokens} "
            f"tokens fit into an arena of {found.arena_bytes:,} bytes; lower batch or prompt-tokens.",
            field="batch",
        )
    return kept
