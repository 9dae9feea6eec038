"""Memory layout of a model: the bytes of a KV block, a state slot, a record, and the slab."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from specdec.errors import ConfigError

ALIGN = 64
"""Alignment of every slot and its parts: a cache line."""

BLOCKS_PER_PLAIN_SLAB = 16
"""Blocks in a slab if no layer has a state.

Blocks are the only class then, so the slab size is free. Sixteen (256 tokens) lose little to the dummy slab
and leave the free list untouched fifteen times in sixteen.
"""


@dataclass(frozen=True, slots=True)
class KVShape:
    """An attention layer's memory per token: `parts` tensors of [heads, dim]."""

    heads: int
    dim: int
    parts: int = 2
    """2: a key and a value; 1: a key whose last entries are its value."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """A recurrent layer's memory; `conv_inputs` is the convolution's kernel - 1.

    A layer that is only a convolution has no heads.
    """

    heads: int
    key_dim: int
    value_dim: int
    conv_inputs: int
    channels: int
    decay_dim: int = 1
    """Log-decays per head: one, or one per row of `key_dim`."""
    runs: tuple[tuple[int, int], ...] = ()
    """Partition of the channels over ranks: (units, channels per unit) of each projection. Empty: not
    partitionable."""


class KVRegion(NamedTuple):
    """The part of a block for attention layers of one shape: [head, layer, part, token, dim].

    Heads are outermost, so each tensor-parallel rank's heads are contiguous.
    """

    shape: KVShape
    layers: tuple[int, ...]
    """Indices of the layers in `Layout.kv`."""
    offset: int
    head_bytes: int
    """Bytes of one head over all these layers."""


class PageParts(NamedTuple):
    """Regions of a block, and their total bytes."""

    regions: tuple[KVRegion, ...]
    size: int


class StateOffsets(NamedTuple):
    """Byte offsets of a layer's state [H, K, W] and its window [C, I] within a slot."""

    state: int
    window: int


class RecordOffsets(NamedTuple):
    update: int
    decay: int
    input: int


class StateParts(NamedTuple):
    layers: tuple[StateOffsets, ...]
    size: int


class RecordParts(NamedTuple):
    layers: tuple[RecordOffsets, ...]
    size: int


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """Summary figures of a layout."""

    token_bytes: int
    block_bytes: int
    state_bytes: int
    record_bytes: int
    slab_bytes: int
    blocks_per_slab: int
    records_per_slab: int
    padding: float
    """Unused fraction of a slab that holds a state."""
    record_share: float
    """A record's bytes relative to a state's; 0 if layers only have windows, whose next inputs records
    are."""


@dataclass(frozen=True)
class Layout:
    """Every size and offset, derived from the layers' shapes.

    `kv` has one entry per attention layer, including the draft head's, and `states` one per recurrent layer.
    `dtype` is that of conv inputs, and of keys and values unless `kv_dtype` is set; `state_dtype` is that of
    states and of a record's update and decay.
    """

    kv: tuple[KVShape, ...]
    states: tuple[StateShape, ...]
    dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32
    block_tokens: int = 16
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not self.kv and not self.states:
            raise ConfigError("no layer has a KV cache or state: give an attention or a recurrent layer")
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens}: give at least 1", field="block_tokens")
        for name in ("dtype", "state_dtype", "kv_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigError(f"{name} is {dtype}: give a floating-point type", field=name)
        for i, kv in enumerate(self.kv):
            if min(kv.heads, kv.dim) < 1 or kv.parts not in (1, 2):
                raise ConfigError(f"attention layer {i} has sizes out of range: {kv}", field="kv")
        for i, state in enumerate(self.states):
            _check_state(i, state)

    @property
    def page_dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.kv_dtype or self.dtype

    @cached_property
    def page_parts(self) -> PageParts:
        layers = {shape: tuple(i for i, kv in enumerate(self.kv) if kv == shape) for shape in self.kv}
        token = self.block_tokens * self.page_dtype.itemsize
        heads = [token * shape.dim * shape.parts * len(indices) for shape, indices in layers.items()]
        offsets, size = _place(shape.heads * head for shape, head in zip(layers, heads, strict=True))
        return PageParts(tuple(map(KVRegion, layers, layers.values(), offsets, heads)), size)

    @cached_property
    def state_parts(self) -> StateParts:
        item, wide_item = self.dtype.itemsize, self.state_dtype.itemsize
        offsets, size = _place(
            part
            for s in self.states
            for part in (wide_item * s.heads * s.key_dim * s.value_dim, item * s.conv_inputs * s.channels)
        )
        return StateParts(tuple(map(StateOffsets, offsets[0::2], offsets[1::2])), size)

    @cached_property
    def record_parts(self) -> RecordParts:
        item, wide = self.dtype.itemsize, self.state_dtype.itemsize
        offsets, size = _place(
            part
            for s in self.states
            for part in (
                wide * s.heads * s.value_dim,
                wide * s.heads * s.decay_dim,
                item * s.channels,
            )
        )
        return RecordParts(tuple(map(RecordOffsets, *(offsets[part::3] for part in range(3)))), size)

    @property
    def conv_width(self) -> int:
        """Inputs of the longest convolution, including its own token's; 1 without convolutions."""
        return max((shape.conv_inputs + 1 for shape in self.states), default=1)

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block over all attention layers; 0 without any."""
        return self.page_parts.size

    @property
    def state_bytes(self) -> int:
        """Bytes of a state slot over all recurrent layers; 0 without any."""
        return self.state_parts.size

    @property
    def record_bytes(self) -> int:
        """Bytes of one draft token's record over all recurrent layers."""
        return self.record_parts.size

    @cached_property
    def slab_bytes(self) -> int:
        """State slot size rounded up to whole blocks, so that block ids have one stride through the arena."""
        if not self.states:
            return BLOCKS_PER_PLAIN_SLAB * self.block_bytes
        # Only toy models have records larger than a state; their slab grows.
        return _round_up(max(self.state_bytes, self.record_bytes), self.block_bytes or ALIGN)

    @cached_property
    def blocks_per_slab(self) -> int:
        return self.slab_bytes // self.block_bytes if self.kv else 0

    @property
    def states_per_slab(self) -> int:
        return 1 if self.states else 0

    @cached_property
    def records_per_slab(self) -> int:
        return self.slab_bytes // self.record_bytes if self.states else 0

    def blocks_for(self, tokens: int) -> int:
        """Return the KV blocks for `tokens` tokens."""
        return -(-tokens // self.block_tokens) if self.kv else 0

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` tokens; a state takes a whole slab."""
        return self.states_per_slab * self.slab_bytes + self.blocks_for(tokens) * self.block_bytes

    def sequences_in(self, num_bytes: int, tokens: int) -> int:
        """Return how many sequences of `tokens` tokens fit into an arena of `num_bytes`."""
        slabs = max(num_bytes // self.slab_bytes - 1, 0)
        return slabs * self.slab_bytes // max(self.sequence_bytes(tokens), 1)

    def describe(self) -> LayoutFigures:
        states = self.state_bytes
        return LayoutFigures(
            token_bytes=self.block_bytes // self.block_tokens,
            block_bytes=self.block_bytes,
            state_bytes=states,
            record_bytes=self.record_bytes,
            slab_bytes=self.slab_bytes,
            blocks_per_slab=self.blocks_per_slab,
            records_per_slab=self.records_per_slab,
            padding=1 - states / self.slab_bytes if states else 0.0,
            record_share=self.record_bytes / states if any(s.heads for s in self.states) else 0.0,
        )


def _check_state(layer: int, state: StateShape) -> None:
    dims = (state.key_dim, state.value_dim)
    is_sized = min(state.channels - 1, state.conv_inputs, state.heads) >= 0
    if not is_sized or (state.heads and min(dims) < 1) or state.decay_dim not in (1, state.key_dim):
        raise ConfigError(f"recurrent layer {layer} has sizes out of range: {state}", field="states")
    if state.runs and (
        sum(units * width for units, width in state.runs) != state.channels or min(map(min, state.runs)) < 1
    ):
        raise ConfigError(
            f"recurrent layer {layer} has runs that are not its channels: {state}", field="states"
        )


def _place(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return the aligned offsets of consecutive parts, and their total size."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += _round_up(size, ALIGN)
    return tuple(offsets), end


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
