"""The layout cuts memory into aligned, disjoint parts, and wastes little on real shapes."""

from dataclasses import asdict, astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ConfigError
from specdec.state_slots.layout import ALIGN, KVShape, Layout, StateShape

QWEN3_NEXT_80B = Layout((KVShape(2, 256),) * 12, (StateShape(32, 128, 128, 3, 8192),) * 36, torch.bfloat16)
QWEN3_NEXT_80B_MTP = Layout((KVShape(2, 256),) * 13, QWEN3_NEXT_80B.states, torch.bfloat16)
NEMOTRON_H_8B = Layout((KVShape(8, 128),) * 4, (StateShape(128, 128, 64, 3, 10240),) * 24, torch.bfloat16)
# One key head per value head: the record's conv inputs are larger, relative to the state, than above.
DELTA_NET_1_TO_1 = Layout((KVShape(2, 256),) * 6, (StateShape(16, 128, 128, 3, 6144),) * 18, torch.bfloat16)

TOY_STATE = StateShape(heads=3, key_dim=5, value_dim=7, conv_inputs=3, channels=11)


@pytest.mark.parametrize(
    ("layout", "record_share"),
    [
        pytest.param(QWEN3_NEXT_80B, 0.02, id="qwen3-next-80b"),
        pytest.param(QWEN3_NEXT_80B_MTP, 0.02, id="qwen3-next-80b-mtp"),
        pytest.param(NEMOTRON_H_8B, 0.02, id="nemotron-h-8b"),
        pytest.param(DELTA_NET_1_TO_1, 0.02, id="delta-net-1-to-1"),
    ],
)
def test_real_shapes_waste_little(layout: Layout, record_share: float) -> None:
    figures = layout.describe()
    print(asdict(figures))
    assert figures.padding < 0.01
    assert figures.record_share <= record_share
    assert layout.slab_bytes == layout.blocks_per_slab * layout.block_bytes


def test_figures_of_a_real_model_are_the_known_ones() -> None:
    """Qwen3-Next-80B-A3B: 36 layers of 32 states of 64 KiB; 24 KiB of KV per token."""
    figures = QWEN3_NEXT_80B.describe()
    assert figures.token_bytes == 12 * 2 * 2 * 256 * 2
    assert figures.state_bytes == 36 * (32 * 64 * 1024 + 3 * 8192 * 2)
    assert figures.record_bytes == 36 * (32 * 128 * 4 + 32 * 4 + 8192 * 2)


kv_shapes = st.lists(
    st.builds(KVShape, heads=st.integers(1, 5), dim=st.integers(1, 65), parts=st.sampled_from([1, 2])),
    max_size=3,
)


@st.composite
def state_shapes(draw: st.DrawFn) -> StateShape:
    return StateShape(
        draw(st.integers(1, 9)),
        draw(st.integers(1, 65)),
        draw(st.integers(1, 65)),
        draw(st.integers(0, 4)),
        draw(st.integers(1, 65)),
    )


@given(
    kv=kv_shapes,
    states=st.lists(state_shapes(), max_size=3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    state_dtype=st.sampled_from([torch.float32, torch.float64]),
    block_tokens=st.sampled_from([1, 16]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_parts_are_aligned_and_disjoint(
    kv: list[KVShape],
    states: list[StateShape],
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    block_tokens: int,
) -> None:
    if not kv and not states:
        return
    layout = Layout(tuple(kv), tuple(states), dtype, state_dtype, block_tokens)
    item, wide = dtype.itemsize, state_dtype.itemsize
    regions = layout.page_parts.regions
    assert sorted(_flat(region.layers for region in regions)) == list(range(len(kv)))
    pages = [region.shape.heads * region.head_bytes for region in regions]
    _assert_tiled([region.offset for region in regions], pages, layout.block_bytes)
    one_by_one = [shape.parts * block_tokens * shape.heads * shape.dim * item for shape in kv]
    assert sum(pages) == sum(one_by_one)
    assert layout.block_bytes <= sum(-(-size // ALIGN) * ALIGN for size in one_by_one)
    slot = [(wide * s.heads * s.key_dim * s.value_dim, item * s.conv_inputs * s.channels) for s in states]
    _assert_tiled(_flat(layout.state_parts.layers), _flat(slot), layout.state_bytes)
    record = [(wide * s.heads * s.value_dim, wide * s.heads, item * s.channels) for s in states]
    _assert_tiled(_flat(layout.record_parts.layers), _flat(record), layout.record_bytes)
    assert layout.slab_bytes % ALIGN == 0
    assert layout.slab_bytes == layout.blocks_per_slab * layout.block_bytes or not kv
    assert layout.records_per_slab * layout.record_bytes <= layout.slab_bytes
    assert layout.state_bytes <= layout.slab_bytes
    assert (layout.records_per_slab >= 1) == (layout.states_per_slab == 1) == bool(states)


def test_layers_of_one_shape_share_a_region() -> None:
    """A head of another shape, or a latent, follows; the layers keep their indices."""
    own, sliding, latent = KVShape(4, 8), KVShape(2, 8), KVShape(1, 40, parts=1)
    layout = Layout((own, sliding, own, latent, own), (), torch.bfloat16)
    first, second, third = layout.page_parts.regions
    assert (first.shape, first.layers, first.offset) == (own, (0, 2, 4), 0)
    assert (second.shape, second.layers, second.offset) == (sliding, (1,), 4 * first.head_bytes)
    assert (third.shape, third.layers, third.offset) == (latent, (3,), layout.block_bytes - third.head_bytes)
    assert first.head_bytes == 3 * 2 * 16 * 8 * 2 and third.head_bytes == 16 * 40 * 2


def _flat(rows) -> list[int]:
    return [value for row in rows for value in row]


def _assert_tiled(offsets: list[int], sizes: list[int], total: int) -> None:
    """Check that parts are in order, aligned, disjoint, and within the total."""
    for offset, size, following in zip(offsets, sizes, [*offsets, total][1:], strict=True):
        assert offset % ALIGN == 0
        assert size <= following - offset < size + ALIGN


def test_a_model_without_states_has_slabs_of_blocks() -> None:
    layout = Layout((KVShape(8, 128),) * 28, (), torch.bfloat16)
    assert layout.slab_bytes == 16 * layout.block_bytes
    assert (layout.blocks_per_slab, layout.states_per_slab, layout.records_per_slab) == (16, 0, 0)
    assert (layout.state_bytes, layout.record_bytes) == (0, 0)
    assert layout.sequence_bytes(17) == 2 * layout.block_bytes
    assert layout.describe().padding == layout.describe().record_share == 0.0


def test_a_model_without_attention_needs_no_blocks() -> None:
    layout = Layout((), (TOY_STATE,) * 2, torch.bfloat16)
    assert (layout.block_bytes, layout.blocks_per_slab, layout.blocks_for(1000)) == (0, 0, 0)
    assert layout.sequence_bytes(1000) == layout.slab_bytes


def test_a_convolution_alone_has_no_heads() -> None:
    layout = Layout((KVShape(1, 8),), (StateShape(0, 0, 0, 2, 33),), torch.bfloat16)
    assert layout.state_bytes == 3 * ALIGN
    assert layout.record_bytes == 2 * ALIGN
    assert layout.describe().record_share == 0.0


def test_a_record_larger_than_its_state_grows_the_slab() -> None:
    layout = Layout((), (StateShape(1, 1, 1, 1, 33),), torch.float32)
    assert layout.state_bytes < layout.record_bytes == layout.slab_bytes
    assert layout.records_per_slab == 1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (63, 4), (65, 5)])
def test_blocks_cover_the_tokens(tokens: int, blocks: int) -> None:
    assert QWEN3_NEXT_80B.blocks_for(tokens) == blocks
    expected = QWEN3_NEXT_80B.slab_bytes + blocks * QWEN3_NEXT_80B.block_bytes
    assert QWEN3_NEXT_80B.sequence_bytes(tokens) == expected


@pytest.mark.parametrize("layout", [QWEN3_NEXT_80B, Layout((KVShape(2, 8),), (), torch.float32)])
@pytest.mark.parametrize("slabs", [0, 1, 2, 3, 9, 40])
@pytest.mark.parametrize("tokens", [1, 63, 65, 5000])
def test_sequences_fit_as_counted_slab_by_slab(layout: Layout, slabs: int, tokens: int) -> None:
    def fits(sequences: int) -> bool:
        blocks = sequences * layout.blocks_for(tokens)
        return sequences * layout.states_per_slab - (-blocks // layout.blocks_per_slab) <= slabs - 1

    counted = layout.sequences_in(slabs * layout.slab_bytes + layout.slab_bytes // 2, tokens)
    assert (counted == 0 or fits(counted)) and not fits(counted + 1)


@pytest.mark.parametrize(
    ("field", "settings_"),
    [
        (None, {"kv": (), "states": ()}),
        ("kv", {"kv": (KVShape(0, 8),)}),
        ("kv", {"kv": (KVShape(1, 8, parts=3),)}),
        ("states", {"states": (StateShape(3, 0, 4, 3, 8),)}),
        ("states", {"states": (StateShape(-1, 4, 4, 3, 8),)}),
        ("states", {"states": (StateShape(1, 4, 4, -1, 8),)}),
        ("states", {"states": (StateShape(1, 4, 4, 3, 0),)}),
        ("states", {"states": (StateShape(1, 4, 4, 3, 8, runs=((2, 2), (2, 3))),)}),
        ("states", {"states": (StateShape(1, 4, 4, 3, 8, runs=((-2, -4),)),)}),
        ("block_tokens", {"block_tokens": 0}),
        ("dtype", {"dtype": torch.int8}),
        ("state_dtype", {"state_dtype": torch.int32}),
    ],
)
def test_impossible_sizes_are_refused_by_name(field: str | None, settings_: dict[str, object]) -> None:
    fields = {"kv": (KVShape(1, 8),), "states": (TOY_STATE,), "dtype": torch.float32} | settings_
    with pytest.raises(ConfigError) as caught:
        Layout(**fields)
    assert caught.value.field == field


def test_layouts_of_equal_shapes_are_equal() -> None:
    twin = Layout(QWEN3_NEXT_80B.kv, QWEN3_NEXT_80B.states, torch.bfloat16)
    assert twin == QWEN3_NEXT_80B and hash(twin) == hash(QWEN3_NEXT_80B)
    assert astuple(twin.describe()) == astuple(QWEN3_NEXT_80B.describe())
