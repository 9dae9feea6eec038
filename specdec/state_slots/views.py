"""Views of an arena's bytes for the kernels: strided tensors indexed by slot id."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.group import RecurrentMemory
from specdec.state_slots.layout import KVRegion, Layout


def page_views(data: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """Return each attention layer's view of all blocks as [blocks, parts, block_tokens, J, D], key first.

    Heads are outermost in a block, so their stride spans all layers of the shape.
    """
    views = {
        layer: _page_view(data, layout, region, index)
        for region in layout.page_parts.regions
        for index, layer in enumerate(region.layers)
    }
    return tuple(views[layer] for layer in range(len(layout.kv)))


def recurrent_views(data: Tensor, layout: Layout) -> tuple[RecurrentMemory, ...]:
    """Return each recurrent layer's views of all state slots, and of all records by slab and index."""
    if not layout.states:
        return ()
    slabs = (len(data) // layout.slab_bytes, layout.slab_bytes)
    records = (layout.records_per_slab, layout.record_bytes)
    state_dtype, dtype = layout.state_dtype, layout.dtype
    memories = []
    parts = zip(layout.states, layout.state_parts.layers, layout.record_parts.layers, strict=True)
    for shape, state, record in parts:
        heads = shape.heads
        decays = (heads,) if shape.decay_dim == 1 else (heads, shape.decay_dim)
        memories.append(
            RecurrentMemory(
                _view(data, state_dtype, state.state, [slabs], (heads, shape.key_dim, shape.value_dim)),
                _view(data, dtype, state.window, [slabs], (shape.channels, shape.conv_inputs)).mT,
                _view(data, state_dtype, record.update, [slabs, records], (heads, shape.value_dim)),
                _view(data, state_dtype, record.decay, [slabs, records], decays),
                _view(data, dtype, record.input, [slabs, records], (shape.channels,)),
            )
        )
    return tuple(memories)


def _page_view(data: Tensor, layout: Layout, region: KVRegion, index: int) -> Tensor:
    """Return a view of all blocks' keys and values of one of the region's layers."""
    shape, tokens, item = region.shape, layout.block_tokens, layout.page_dtype.itemsize
    by_part = tokens * shape.dim
    return torch.as_strided(
        data.view(layout.page_dtype),
        (len(data) // layout.block_bytes, shape.parts, tokens, shape.heads, shape.dim),
        (layout.block_bytes // item, by_part, shape.dim, region.head_bytes // item, 1),
        region.offset // item + index * shape.parts * by_part,
    )


def _view(
    data: Tensor,
    dtype: torch.dtype,
    offset: int,
    outer: Sequence[tuple[int, int]],
    inner: tuple[int, ...],
) -> Tensor:
    """Return a view from `offset` on: `outer` gives (count, byte stride), inner dimensions are contiguous."""
    strides = [step // dtype.itemsize for _, step in outer]
    dense = [1]
    for size in reversed(inner[1:]):
        dense.insert(0, dense[0] * size)
    shape = [count for count, _ in outer] + list(inner)
    return torch.as_strided(data.view(dtype), shape, strides + dense, offset // dtype.itemsize)
