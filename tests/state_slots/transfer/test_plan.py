"""Plans read every byte of a slot from a rank that has it, and nothing outside the arenas."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ConfigError
from specdec.models.mixers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Lightning,
    Mamba1,
    Mamba2,
    Mixer,
    ShortConv,
)
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.transfer import plan, rank_parts
from specdec.state_slots.transfer.model_layout import ModelLayout
from specdec.state_slots.transfer.plan import ArenaView, make_plans, read_view
from tests.state_slots.transfer.trial import check_landing

SIZES = (1, 2, 4, 8)


def delta_net(scale: int = 1) -> GatedDeltaNet:
    return GatedDeltaNet(16 // scale, 32 // scale, 128, 128, 4, 1e-6)


def mamba2(scale: int = 1) -> Mamba2:
    return Mamba2(128 // scale, 64, 8 // scale, 128, 4, True, False, 1e-5, (0.0, 1.0))


def mamba1(scale: int = 1, heads: int = 1) -> Mamba1:
    return Mamba1(64 // scale, 16, 4, 4, True, False, heads=heads)


MIXERS = {
    "gated delta net": delta_net,
    "Mamba-2": mamba2,
    "Kimi delta attention": lambda scale=1: KimiDeltaAttention(8 // scale, 16, 4, 1e-6, None),
    "Mamba-1": mamba1,
    "Mamba-1 of heads": lambda scale=1: mamba1(scale, heads=8 // scale),
    "short convolution": lambda scale=1: ShortConv(64 // scale, 3, False),
    "lightning attention": lambda scale=1: Lightning(8 // scale, 16, 1.0, 1e-6),
}
NARROW = (
    GatedDeltaNet(8, 16, 3, 2, 4, 1e-6).state_shape(),
    Mamba2(16, 3, 8, 2, 3, True, False, 1e-5, (0.0, 1.0)).state_shape(),
    KimiDeltaAttention(8, 3, 4, 1e-6, None).state_shape(),
    Mamba1(16, 3, 2, 4, True, False).state_shape(),
    Mamba1(32, 2, 2, 4, True, False, heads=8).state_shape(),
    ShortConv(24, 3, False).state_shape(),
    Lightning(8, 3, 1.0, 1e-6).state_shape(),
)
QWEN = Layout((KVShape(2, 256),) * 13, (delta_net().state_shape(),) * 36, torch.bfloat16)
NEMOTRON = Layout((KVShape(8, 128),) * 4, (mamba2().state_shape(),) * 24, torch.bfloat16)
TOY = Layout((KVShape(4, 3), KVShape(2, 3), KVShape(4, 3), KVShape(1, 5, parts=1)), NARROW, torch.bfloat16)


def view(layout: Layout = QWEN, tp: int = 1, rank: int = 0, slabs: int = 5, base: int = 1 << 20) -> ArenaView:
    cut = ModelLayout.of(layout)
    return ArenaView(base, slabs * cut.layout(tp).slab_bytes, cut, tp, rank, 0)


def views(layout: Layout, tp: int) -> list[ArenaView]:
    return [view(layout, tp, rank) for rank in range(tp)]


def test_equal_sizes_take_one_row_for_blocks_and_one_for_states() -> None:
    made = make_plans(view(), [view(slabs=7, base=1 << 30)])[0]
    block, state, slab, per_slab = QWEN.block_bytes, QWEN.state_bytes, QWEN.slab_bytes, QWEN.blocks_per_slab
    assert made.local.tolist() == [[1 << 20, block, 0, block, 5 * per_slab], [1 << 20, state, 0, slab, 5]]
    assert made.remote.tolist() == [[1 << 30, block, 0, block, 7 * per_slab], [1 << 30, state, 0, slab, 7]]
    local, remote = made.pick([(per_slab, 3 * per_slab), (9 + per_slab, 4)], (2, 6))
    assert local.dtype == remote.dtype == np.int32
    assert local.tolist() == [per_slab, 9 + per_slab, 5 * per_slab + 2]
    assert remote.tolist() == [3 * per_slab, 4, 7 * per_slab + 6]
    assert made.num_bytes(2, 1) == 2 * block + state
    assert [len(ids) for ids in made.pick([], None)] == [0, 0]


@given(
    kv=st.lists(
        st.sampled_from([KVShape(h, d, p) for h in (1, 2, 4, 8, 16) for d in (1, 3) for p in (1, 2)])
    ),
    states=st.lists(st.sampled_from(NARROW), max_size=4),
    dtype=st.sampled_from([torch.bfloat16, torch.float64]),
    kv_dtype=st.sampled_from([None, torch.float8_e4m3fn]),
    state_dtype=st.sampled_from([torch.float32, torch.float64]),
    block_tokens=st.sampled_from([1, 4, 16]),
    remote_tp=st.sampled_from(SIZES),
    local_tp=st.sampled_from(SIZES),
)
@settings(max_examples=120, derandomize=True)
def test_bytes_land_where_the_whole_model_has_them(
    kv: list[KVShape],
    states: list[StateShape],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    state_dtype: torch.dtype,
    block_tokens: int,
    remote_tp: int,
    local_tp: int,
) -> None:
    if kv or states:
        layout = Layout(tuple(kv), tuple(states), dtype, state_dtype, block_tokens, kv_dtype)
        check_landing(layout, remote_tp, local_tp)


@pytest.mark.parametrize("remote_tp", SIZES)
@pytest.mark.parametrize("local_tp", SIZES)
def test_all_kinds_of_layers_land_together(remote_tp: int, local_tp: int) -> None:
    check_landing(TOY, remote_tp, local_tp)


@pytest.mark.parametrize(("remote_tp", "local_tp"), [(1, 2), (4, 2), (8, 1)])
def test_swapped_projections_are_noticed(
    remote_tp: int, local_tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gated delta net's queries and keys have the same sizes."""
    layout = Layout((), NARROW[:1], torch.bfloat16)

    def swapped(cut: ModelLayout, tp: int, rank: int) -> list[rank_parts.RankUnits]:
        state, q, k, v = rank_parts.state_parts(cut, tp, rank)
        return [state, k, q, v] if tp == remote_tp else [state, q, k, v]

    monkeypatch.setattr(plan, "state_parts", swapped)
    with pytest.raises(AssertionError):
        check_landing(layout, remote_tp, local_tp)


@pytest.mark.parametrize(("remote_tp", "local_tp"), [(1, 2), (4, 2), (4, 8)])
@pytest.mark.parametrize("layout", [Layout((KVShape(2, 3),), (), torch.bfloat16), TOY])
def test_head_0_for_every_rank_is_noticed(
    layout: Layout, remote_tp: int, local_tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_parts, "rank_units", lambda units, tp, rank: range(max(1, units // tp)))
    with pytest.raises(AssertionError):
        check_landing(layout, remote_tp, local_tp)


@pytest.mark.parametrize(("remote_tp", "local_tp"), [(1, 2), (4, 2), (4, 8)])
@pytest.mark.parametrize("state", NARROW[:3])
def test_a_window_cut_as_one_run_is_noticed(state: StateShape, remote_tp: int, local_tp: int) -> None:
    layout = Layout((), (state,), torch.bfloat16)
    one_run = replace(state, runs=((state.channels, 1),))
    with pytest.raises(AssertionError):
        check_landing(layout, remote_tp, local_tp, ModelLayout.of(replace(layout, states=(one_run,))))


def test_runs_joined_by_one_side_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = rank_parts._joined

    def by_our_side(runs: list[rank_parts.ByteRun]) -> list[rank_parts.ByteRun]:
        return [
            run._replace(theirs=runs[0].theirs) for run in joined(r._replace(theirs=r.ours) for r in runs)
        ]

    monkeypatch.setattr(rank_parts, "_joined", by_our_side)
    with pytest.raises(AssertionError):
        check_landing(TOY, 1, 2)


@pytest.mark.parametrize(
    ("layout", "remote_tp", "local_tp", "per_block", "per_state"),
    [
        pytest.param(QWEN, 1, 1, 1, 1, id="equal sizes"),
        pytest.param(QWEN, 1, 2, 1, 4 * 36, id="1 to 2: state and three projections of a layer"),
        pytest.param(NEMOTRON, 1, 2, 1, 4 * 24, id="1 to 2: several heads a rank"),
        pytest.param(NEMOTRON, 2, 4, 1, 4 * 24, id="2 to 4"),
        pytest.param(NEMOTRON, 4, 2, 1, 4 * 24, id="4 to 2"),
    ],
)
def test_descriptors_are_few(
    layout: Layout, remote_tp: int, local_tp: int, per_block: int, per_state: int
) -> None:
    for local in views(layout, local_tp):
        for made in make_plans(local, views(layout, remote_tp)).values():
            assert [len(ids) for ids in made.pick([(8, 8)], None)] == [per_block] * 2
            assert [len(ids) for ids in made.pick([], (3, 3))] == [per_state] * 2


def test_a_head_on_several_ranks_is_read_from_each_in_turn() -> None:
    layout = Layout((KVShape(2, 64),), (), torch.bfloat16)
    sources = [list(make_plans(own, views(layout, 8))) for own in views(layout, 4)]
    assert sources == [[0], [1], [6], [7]]
    assert [list(make_plans(own, views(layout, 2))) for own in views(layout, 8)] == [[0]] * 4 + [[1]] * 4
    assert list(make_plans(view(layout), views(layout, 2))) == [0, 1]


@pytest.mark.parametrize("name", MIXERS)
def test_a_ranks_layout_equals_a_model_with_its_share_of_heads(name: str) -> None:
    mixer: Mixer
    for tp in SIZES:
        mixer = MIXERS[name](tp)
        cut = ModelLayout.of(Layout((), (MIXERS[name]().state_shape(),), torch.bfloat16))
        assert cut.layout(tp).states == (mixer.state_shape(),)


def test_windows_are_cut_by_projection() -> None:
    assert delta_net().state_shape().runs == ((16, 128), (16, 128), (32, 128))
    assert mamba2().state_shape().runs == ((128, 64), (8, 128), (8, 128))


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"kv": (KVShape(2, 256),) * 12}, "kv", "kv.12.heads is None at the peer and 2 here"),
        ({"kv": (KVShape(4, 256),) * 13}, "kv", "kv.0.heads is 4 at the peer and 2 here"),
        (
            {"states": (delta_net(2).state_shape(),) * 36},
            "states",
            "states.0.heads is 16 at the peer and 32 here",
        ),
        ({"dtype": torch.float16}, "dtype", "dtype is 'float16' at the peer and 'bfloat16' here"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv_dtype", "kv_dtype is 'float8_e4m3fn'"),
        ({"state_dtype": torch.float64}, "state_dtype", "state_dtype is 'float64'"),
        ({"block_tokens": 32}, "block_tokens", "block_tokens is 32 at the peer and 16 here"),
    ],
)
def test_another_layout_is_refused_by_name(change: dict[str, object], field: str, said: str) -> None:
    with pytest.raises(ConfigError, match="start both engines with the same model") as caught:
        make_plans(view(), [view(replace(QWEN, **change))])
    assert caught.value.field == field and said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"base": 0}, "base"),
        ({"base": -4096}, "base"),
        ({"base": (1 << 63) - 4096}, "base"),
        ({"num_bytes": 5 * QWEN.slab_bytes - 1}, "num_bytes"),
        ({"num_bytes": QWEN.slab_bytes}, "num_bytes"),
        ({"num_bytes": -2 * QWEN.slab_bytes}, "num_bytes"),
        ({"num_bytes": QWEN.slab_bytes << 31}, "num_bytes"),
        ({"tp": 0}, "rank"),
        ({"tp": 2, "num_bytes": 0}, "num_bytes"),
        ({"tp": 3}, "tp"),
        ({"tp": 1 << 60}, "tp"),
        ({"rank": 1}, "rank"),
        ({"rank": -1}, "rank"),
        ({"device": -1}, "device"),
        ({"cut": replace(ModelLayout.of(QWEN), order="blocks [token, head]")}, "order"),
    ],
)
def test_wrong_numbers_are_refused_by_name(change: dict[str, object], field: str) -> None:
    for pair in ((view(), replace(view(), **change)), (replace(view(), **change), view())):
        with pytest.raises(ConfigError) as caught:
            make_plans(pair[0], [pair[1]])
        assert caught.value.field == field


@pytest.mark.parametrize(("ranks", "field"), [([], "tp"), ([0], "tp"), ([0, 0], "rank"), ([0, 1, 1], "tp")])
def test_a_peer_shows_each_of_its_ranks_once(ranks: list[int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plans(view(), [view(tp=2, rank=rank) for rank in ranks])
    assert caught.value.field == field


def test_ranks_of_several_sizes_are_no_peer() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plans(view(), [view(tp=2, rank=0), view(tp=4, rank=1)])
    assert caught.value.field == "tp"


@pytest.mark.parametrize(
    ("layout", "tp", "said"),
    [
        (QWEN, 3, "2 KV heads of attention layer 0"),
        (replace(QWEN, kv=()), 3, "32 heads of recurrent layer 0"),
        (QWEN, 32, "16 units of channels of recurrent layer 0"),
        (NEMOTRON, 16, "8 units of channels of recurrent layer 0"),
        (Layout((KVShape(6, 8),), (), torch.bfloat16), 4, "6 KV heads of attention layer 0"),
        (
            Layout((), (StateShape(4, 8, 8, 3, 64),), torch.bfloat16),
            2,
            "does not say how its channels are cut",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(layout: Layout, tp: int, said: str) -> None:
    with pytest.raises(ConfigError, match="give") as caught:
        make_plans(view(layout), [replace(view(layout), tp=tp, rank=rank) for rank in range(tp)])
    assert caught.value.field == "tp" and said in str(caught.value)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_no_id_outside_of_an_arena_is_picked(side: int, tp: int) -> None:
    made = make_plans(view(), views(QWEN, tp))[0]
    counts = (made.local, made.remote)[side][[0, -1], 4].tolist()
    for bad in (-1, counts[0], 1 << 31, 1 << 80):
        with pytest.raises(ConfigError) as caught:
            made.pick([(8, 8), (8, bad) if side else (bad, 8)], None)
        assert caught.value.field == "blocks"
    for bad in (-1, counts[1], 1 << 80):
        with pytest.raises(ConfigError) as caught:
            made.pick([], (1, bad) if side else (bad, 1))
        assert caught.value.field == "state"


def test_a_view_travels_as_json() -> None:
    for layout in (QWEN, TOY):
        sent = view(layout, slabs=9)
        assert read_view(json.loads(json.dumps(sent.as_json()))) == sent


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"base": "1048576"}, "base"),
        ({"base": True}, "base"),
        ({"num_bytes": 1.5}, "num_bytes"),
        ({"rank": None}, "rank"),
        ({"novelty": 1}, "novelty"),
        ({"cut": []}, "cut"),
        (
            {"cut": asdict(ModelLayout.of(QWEN)) | {"kv": [{"heads": 2, "dim": 256, "part": 2}]}},
            "cut.kv.0.part",
        ),
        ({"cut": asdict(ModelLayout.of(QWEN)) | {"block_tokens": "16"}}, "cut.block_tokens"),
        ({"cut": {"order": ""}}, "cut.block_tokens"),
    ],
)
def test_peer_messages_are_validated_strictly(change: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match="the same build") as caught:
        read_view(view().as_json() | change)
    assert caught.value.field == field
