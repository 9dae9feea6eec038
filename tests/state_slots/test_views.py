"""Views show each slot's bytes once, and a tensor-parallel rank's share of them in runs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.kernels.group import RecurrentMemory
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.views import page_views, recurrent_views

STATE = StateShape(heads=8, key_dim=4, value_dim=6, conv_inputs=3, channels=2 * 8 * 4 + 8 * 6)
"""A delta net of 8 heads: its channels are queries, keys and values."""
PARTS = (32, 32, 48)
LAYOUTS = {
    "one shape": Layout((KVShape(8, 16),) * 3, (), torch.bfloat16),
    "an odd dim": Layout((KVShape(4, 5),) * 2, (STATE,) * 2, torch.float32),
    "a head of another shape": Layout((KVShape(8, 16),) * 2 + (KVShape(4, 24),), (STATE,), torch.bfloat16),
    "sliding layers between": Layout((KVShape(4, 16), KVShape(8, 16)) * 2, (STATE,), torch.bfloat16),
    "a latent": Layout((KVShape(1, 40, parts=1), KVShape(8, 16)), (STATE,), torch.bfloat16),
    "8 bits": Layout((KVShape(8, 16),) * 3, (), torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def cut(only: Callable[[Layout], object]) -> pytest.MarkDecorator:
    """List each layout with all rank counts that divide its heads."""
    cases = [
        pytest.param(layout, ranks, id=f"{name}-{ranks}")
        for name, layout in LAYOUTS.items()
        for ranks in (1, 2, 4, 8)
        if only(layout) and not any(kv.parts == 2 and kv.heads % ranks for kv in layout.kv)
    ]
    return pytest.mark.parametrize(("layout", "ranks"), cases)


def rank_of(layout: Layout, ranks: int) -> Layout:
    """Return one rank's layout; each rank has the whole latent."""
    kv = tuple(replace(own, heads=own.heads // ranks) if own.parts == 2 else own for own in layout.kv)
    states = tuple(
        replace(state, heads=state.heads // ranks, channels=state.channels // ranks)
        for state in layout.states
    )
    return replace(layout, kv=kv, states=states)


def make_data(layout: Layout, slabs: int = 2) -> Tensor:
    return torch.zeros(slabs * layout.slab_bytes, dtype=torch.uint8)


def bytes_of(data: Tensor, view: Tensor) -> Tensor:
    """Return a mask of the bytes that a view covers."""
    data.zero_()
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.itemsize]
    view.view(same).fill_(-1 if view.itemsize > 1 else 255)
    return (data != 0).long()


@layouts
def test_each_byte_of_a_block_is_shown_once(layout: Layout) -> None:
    data = make_data(layout)
    views = page_views(data, layout)
    for kv, view in zip(layout.kv, views, strict=True):
        blocks = len(data) // layout.block_bytes
        assert view.shape == (blocks, kv.parts, layout.block_tokens, kv.heads, kv.dim)
    for block in (0, len(views[0]) - 1):
        counted = sum(bytes_of(data, view[block]) for view in views)
        assert counted.sum() == sum(view[block].nbytes for view in views) and counted.max() == 1
        outside = torch.ones(len(data), dtype=torch.bool)
        outside[block * layout.block_bytes : (block + 1) * layout.block_bytes] = False
        assert not counted[outside].any()


def number(views: tuple[Tensor, ...]) -> None:
    """Write distinguishing numbers by layer, part, token, head and entry of a block."""
    for layer, view in enumerate(views):
        at = torch.arange(view[0].numel()).view(view.shape[1:])
        view.copy_(((at * 7 + layer * 13) % 241).to(view.dtype))


@cut(lambda layout: layout.kv)
def test_the_heads_of_a_rank_are_one_run_of_each_region(layout: Layout, ranks: int) -> None:
    """The runs of the whole, concatenated, are the block of the rank."""
    own_layout = rank_of(layout, ranks)
    data, own_data = make_data(layout), make_data(own_layout)
    views, own_views = page_views(data, layout), page_views(own_data, own_layout)
    number(views)
    block = data[layout.block_bytes : 2 * layout.block_bytes]
    for rank in range(ranks):
        for view, own_view in zip(views, own_views, strict=True):
            heads = own_view.shape[3]
            first = rank * heads if heads < view.shape[3] else 0
            own_view.copy_(view[: len(own_view), :, :, first : first + heads])
        own_block = own_data[own_layout.block_bytes : 2 * own_layout.block_bytes]
        regions = zip(layout.page_parts.regions, own_layout.page_parts.regions, strict=True)
        for region, own_region in regions:
            size = own_region.shape.heads * own_region.head_bytes
            first = region.offset + (rank * size if own_region.shape != region.shape else 0)
            assert torch.equal(
                block[first : first + size], own_block[own_region.offset : own_region.offset + size]
            )


@cut(lambda layout: layout.states)
def test_the_channels_of_a_rank_are_one_run_of_each_part(layout: Layout, ranks: int) -> None:
    """Of queries, keys and values: three runs per layer, which form the rank's own windows."""
    own_layout = rank_of(layout, ranks)
    data, own_data = make_data(layout), make_data(own_layout)
    memories, own_memories = recurrent_views(data, layout), recurrent_views(own_data, own_layout)
    for memory in memories:
        number((memory.window_SIC,))
    item, inputs = layout.dtype.itemsize, STATE.conv_inputs
    for rank in range(ranks):
        for layer, (memory, own) in enumerate(zip(memories, own_memories, strict=True)):
            at, own_at = layout.state_parts.layers[layer].window, own_layout.state_parts.layers[layer].window
            own.window_SIC.copy_(_of_rank(memory, rank, ranks))
            for width in PARTS:
                size = width // ranks * inputs * item
                assert torch.equal(
                    data[at + rank * size : at + (rank + 1) * size], own_data[own_at : own_at + size]
                )
                at, own_at = at + width * inputs * item, own_at + size


def _of_rank(memory: RecurrentMemory, rank: int, ranks: int) -> Tensor:
    """Return a rank's queries, keys and values of the windows."""
    parts = memory.window_SIC.split(PARTS, dim=2)
    return torch.cat([part.chunk(ranks, dim=2)[rank] for part in parts], dim=2)


@layouts
def test_windows_are_shown_oldest_first(layout: Layout) -> None:
    """As [slabs, inputs, channels], with a channel's inputs adjacent in memory."""
    data = make_data(layout)
    for memory, state in zip(recurrent_views(data, layout), layout.states, strict=True):
        assert memory.window_SIC.shape == (2, state.conv_inputs, state.channels)
        assert memory.window_SIC.stride()[1:] == (1, state.conv_inputs)
        assert bytes_of(data, memory.window_SIC[1]).sum() == memory.window_SIC[1].nbytes
