"""Memory of weights, drafts and sequences, and the size of the arena."""

import logging

import torch

from specdec.config.engine import EngineConfig
from specdec.core.device.extent import Extent
from specdec.draft.proposal import DraftShape
from specdec.errors import CapacityError
from specdec.models import spec
from specdec.models.formats import WeightFormat
from specdec.models.rounded import COPIED_IN
from specdec.models.tensors import PackedSizes
from specdec.setup.devices import free_memory
from specdec.state_slots.layout import Layout

logger = logging.getLogger(__name__)

ROW = 4096
"""Assumed row length of matrices of which only the total size is known."""
AUTO_MEMORY_SHARE = {"cpu": 0.4, "cuda": 0.8}
"""Default fraction of free memory for the arena. A CPU's memory is shared with other processes."""


def arena_bytes(
    config: EngineConfig,
    layout: Layout,
    bounds: DraftShape | None,
    longest: int,
    *,
    device: torch.device,
    weights: int,
    copied: bool = False,
) -> int:
    """Return the arena's size: as configured, or what all sequences and drafts need, if free."""
    if config.memory_bytes is not None:
        return config.memory_bytes
    # Besides sequences: the dummy slab, a partly used slab of blocks, and drafts.
    wanted = config.max_running * layout.sequence_bytes(longest) + 2 * layout.slab_bytes
    wanted += draft_bytes(config, layout, bounds, copied=copied) if bounds else 0
    free = max(free_memory(device) - weights, 0)
    return min(wanted, int(AUTO_MEMORY_SHARE[device.type] * free) // config.tp)


def draft_bytes(config: EngineConfig, layout: Layout, bounds: DraftShape, *, copied: bool) -> int:
    """Return the bytes that all running requests may borrow for drafts, in whole slabs.

    A `copied` network drafts in a separate state per request.
    """
    extent = Extent.of(config.max_running, bounds, looks=True, written=bounds.topk * bounds.num_steps)
    blocks = config.max_running * layout.blocks_for(extent.ahead + layout.block_tokens)
    slabs = -(-blocks * layout.block_bytes // layout.slab_bytes)
    slots = extent.records if config.slots == "record" else extent.snapshots
    per_slab = layout.records_per_slab if config.slots == "record" else layout.states_per_slab
    slabs += -(-config.max_running * slots // per_slab) if per_slab else 0
    slabs += config.max_running * layout.states_per_slab if copied else 0
    return slabs * layout.slab_bytes


def weight_bytes(
    network: spec.NetworkSpec,
    dtype: torch.dtype,
    stored: torch.dtype,
    stored_bytes: int,
    narrow_bytes: int,
    *,
    quantize: str | None,
    kept: WeightFormat | None,
    packed: PackedSizes | None = None,
    packed_bytes: int = 0,
) -> int:
    """Return the bytes of the loaded weights, from a checkpoint's stored sizes.

    `narrow_bytes` are those of 8-bit floats. Integers, `packed`, will use `packed_bytes`.
    """
    if packed:
        return packed_bytes + (stored_bytes - packed.stored) // stored.itemsize * dtype.itemsize
    wide, narrow, table = (stored_bytes - narrow_bytes) // stored.itemsize, narrow_bytes, 0
    if quantize:
        table = network.vocab * network.hidden
        tables = min(table * (1 if network.tied else 2), wide)
        wide, narrow = tables, wide - tables + narrow_bytes
    if kept is None:
        return (wide + narrow) * dtype.itemsize
    total = wide * dtype.itemsize + kept.num_bytes((-(-narrow // ROW), ROW))
    if table and kept.output:
        total += kept.output.num_bytes((network.vocab, network.hidden))
        total -= 0 if network.tied else table * dtype.itemsize
    return total


def copy_bytes(
    network: spec.NetworkSpec,
    dtype: torch.dtype,
    stored: torch.dtype,
    stored_bytes: int,
    narrow_bytes: int,
    *,
    kept: WeightFormat | None,
    packed: PackedSizes | None = None,
) -> int:
    """Return the bytes of a quantised copy besides the network, whose embedding it shares."""
    stored_bytes += packed.entries * stored.itemsize - packed.stored if packed else 0
    sizes = network, dtype, stored, stored_bytes, narrow_bytes
    num_bytes = weight_bytes(*sizes, quantize=COPIED_IN, kept=kept)
    return num_bytes - network.vocab * network.hidden * dtype.itemsize


def longest_that_fits(config: EngineConfig, layout: Layout, memory_bytes: int, longest: int) -> int:
    """Return the maximum length of one sequence that the arena can hold."""

    def needed(tokens: int) -> int:
        slabs = 1 + layout.states_per_slab
        if layout.kv:
            slabs += -(-layout.blocks_for(tokens) // layout.blocks_per_slab)
        return slabs * layout.slab_bytes

    if needed(longest) <= memory_bytes:
        return longest
    smallest = needed(layout.block_tokens)
    if config.max_model_len is not None or smallest > memory_bytes:
        length = longest if config.max_model_len is not None else layout.block_tokens
        remedy = "raise it" if config.memory_bytes is not None else "free some memory, or set memory_bytes"
        raise CapacityError(
            f"memory_bytes: one sequence of {length} tokens needs {needed(length):,} bytes and the arena has "
            f"{memory_bytes:,}; {remedy}{' or lower max_model_len' if smallest <= memory_bytes else ''}.",
            field="memory_bytes",
        )
    spare_slabs = memory_bytes // layout.slab_bytes - 1 - layout.states_per_slab
    fitting = spare_slabs * layout.blocks_per_slab * layout.block_tokens
    logger.warning(
        "max_model_len is %d instead of %d: memory_bytes, %d, holds no more", fitting, longest, memory_bytes
    )
    return fitting
