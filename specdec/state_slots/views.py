"""Show an arena's bytes to the kernels: strided tensors that slot ids index."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.group import RecurrentMemory
from specdec.state_slots.layout import Layout


def page_views(data: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """View each attention layer's part of all blocks as [blocks, parts, block_tokens, J, D], key first."""
    if not layout.kv:
        return ()
    blocks = (len(data) // layout.block_bytes, layout.block_bytes)
    return tuple(
        _view(data, layout.page_dtype, offset, [blocks], (kv.parts, layout.block_tokens, kv.heads, kv.dim))
        for kv, offset in zip(layout.kv, layout.page_parts.layers, strict=True)
    )


def recurrent_views(data: Tensor, layout: Layout) -> tuple[RecurrentMemory, ...]:
    """View each recurrent layer's part of all state slots, and of all records by slab and place in it."""
    if not layout.states:
        return ()
    slabs = (len(data) // layout.slab_bytes, layout.slab_bytes)
    records = (layout.records_per_slab, layout.record_bytes)
    wide, narrow = layout.state_dtype, layout.dtype
    memories = []
    parts = zip(layout.states, layout.state_parts.layers, layout.record_parts.layers, strict=True)
    for shape, state, record in parts:
        heads = shape.heads
        decays = (heads,) if shape.decay_dim == 1 else (heads, shape.decay_dim)
        memories.append(
            RecurrentMemory(
                _view(data, wide, state.state, [slabs], (heads, shape.key_dim, shape.value_dim)),
                _view(data, narrow, state.window, [slabs], (shape.conv_inputs, shape.channels)),
                _view(data, wide, record.update, [slabs, records], (heads, shape.value_dim)),
                _view(data, wide, record.decay, [slabs, records], decays),
                _view(data, narrow, record.input, [slabs, records], (shape.channels,)),
            )
        )
    return tuple(memories)


def _view(
    data: Tensor,
    dtype: torch.dtype,
    offset: int,
    outer: Sequence[tuple[int, int]],
    inner: tuple[int, ...],
) -> Tensor:
    """View bytes from `offset` on: `outer` gives (count, bytes apart), the inner dimensions are dense."""
    strides = [step // dtype.itemsize for _, step in outer]
    dense = [1]
    for size in reversed(inner[1:]):
        dense.insert(0, dense[0] * size)
    shape = [count for count, _ in outer] + list(inner)
    return torch.as_strided(data.view(dtype), shape, strides + dense, offset // dtype.itemsize)
