"""Resolution of "auto" and omitted settings, and refusals of values by name."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.engine import MAX_WINDOW, EngineConfig
from specdec.draft.proposal import DraftShape
from specdec.errors import CapacityError, ConfigError
from specdec.models import spec
from specdec.models.families import network
from specdec.models.formats import FORMATS
from specdec.models.head_folder import HeadFolder
from specdec.models.heads import HeadSource, OwnHead
from specdec.models.mixers import Attention
from specdec.models.shapes import SHAPES
from specdec.setup import memory
from specdec.setup.devices import pick_device
from specdec.setup.drafters import SELF_IS_TARGET, SELF_ON_DEVICE, SELF_ON_GPU
from specdec.setup.footprint import measure
from specdec.setup.memory import copy_bytes, weight_bytes
from specdec.setup.resolve import resolve
from specdec.setup.settings import Resolved
from specdec.state_slots.layout import KVShape

SMALL = {
    **SHAPES["tiny"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "vocab_size": 65,
    "max_position_embeddings": 512,
    "mtp_num_hidden_layers": 1,
}
WITH_HEAD, WITHOUT_HEAD = network(SMALL), network({**SMALL, "mtp_num_hidden_layers": 0})
PLENTY = 1 << 30
steps, topks = st.integers(1, 70), st.integers(1, 9)
windows = st.integers(2, MAX_WINDOW)


EAGLE = spec.Eagle(
    width=32,
    vocab=65,
    layers=(spec.LayerSpec((Attention(2, 1, 8, 1.0, None, None, gated=False),), None, reads=64),),
    norm=WITH_HEAD.norm,
    aux_hidden_layers=(0, 1, 2),
    target_width=32,
    ranked=65,
    fc_bias=False,
    own_embed=False,
    own_head=False,
)


def settle(
    model: spec.NetworkSpec = WITH_HEAD, /, *, eagle: spec.Eagle | None = None, **fields: Any
) -> Resolved:
    config = EngineConfig.of(None, {"device": "cpu", "memory_bytes": PLENTY, **fields})
    heads: dict[str, HeadSource] = {"mtp": OwnHead(model.mtp)} if model.mtp else {}
    if eagle:
        # Resolving settings reads no folder.
        heads["eagle"] = HeadFolder(None, eagle, None, None)  # type: ignore[arg-type]
    return resolve(config, model, torch.float32, stored_bytes=1 << 20, heads=heads if eagle else None)


def most_tokens(num_steps: int, topk: int) -> int:
    """Return the maximum tree size: the root, its children, then the best of each level's children."""
    return 1 + topk + (num_steps - 1) * topk * topk


@pytest.mark.parametrize(
    ("given_numbers", "bounds"),
    [
        ({}, DraftShape(5, 4, 8)),
        ({"num_steps": 5}, DraftShape(5, 1, 6)),
        ({"num_steps": 1}, DraftShape(1, 1, 2)),
        ({"num_steps": 500}, DraftShape(63, 1, 64)),
        ({"topk": 1}, DraftShape(5, 1, 6)),
        ({"topk": 2}, DraftShape(5, 2, 8)),
        ({"num_draft_tokens": 6}, DraftShape(5, 1, 6)),
        ({"num_draft_tokens": 2}, DraftShape(1, 1, 2)),
        ({"num_steps": 3, "topk": 1}, DraftShape(3, 1, 4)),
        ({"num_steps": 9, "topk": 2}, DraftShape(9, 2, 10)),
        ({"num_steps": 1, "topk": 4}, DraftShape(1, 4, 5)),
        ({"num_steps": 3, "num_draft_tokens": 4}, DraftShape(3, 1, 4)),
        ({"num_steps": 3, "num_draft_tokens": 16}, DraftShape(3, 4, 16)),
        ({"num_steps": 5, "num_draft_tokens": 3}, DraftShape(2, 1, 3)),
        ({"topk": 1, "num_draft_tokens": 8}, DraftShape(7, 1, 8)),
        ({"topk": 3, "num_draft_tokens": 12}, DraftShape(5, 3, 12)),
        ({"topk": 30}, DraftShape(3, 30, 8)),
        ({"num_steps": 4, "topk": 4, "num_draft_tokens": 16}, DraftShape(4, 4, 16)),
        ({"num_steps": 4, "topk": 4, "num_draft_tokens": 3}, DraftShape(2, 4, 3)),
    ],
)
def test_numbers_left_out_follow_from_those_given(given_numbers: dict[str, int], bounds: DraftShape) -> None:
    assert settle(**given_numbers).bounds == bounds


@given(st.none() | steps, st.none() | topks, st.none() | windows)
def test_given_settings_bound_every_draft(
    num_steps: int | None, topk: int | None, num_draft_tokens: int | None
) -> None:
    if num_steps and topk and num_draft_tokens:
        num_draft_tokens = min(num_draft_tokens, most_tokens(num_steps, topk))
    deepest = min(num_steps or 1, (num_draft_tokens or MAX_WINDOW) - 1)
    if topk and 1 + topk * (deepest - 1) > MAX_WINDOW:
        return  # refused, see below
    bounds = settle(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens).bounds
    assert bounds.num_steps <= (num_steps or MAX_WINDOW)
    assert bounds.topk == (topk or bounds.topk)
    assert 2 <= bounds.num_draft_tokens <= (num_draft_tokens or MAX_WINDOW)
    # A draft can be as deep and as wide as the bounds allow.
    assert bounds.num_steps < bounds.num_draft_tokens <= most_tokens(bounds.num_steps, bounds.topk)


@pytest.mark.parametrize("numbers", [(10, 8, 16), (3, 40, 64), (2, 100, 8)])
def test_a_tree_that_grows_too_wide_for_a_window_is_refused_by_name(numbers: tuple[int, int, int]) -> None:
    num_steps, topk, num_draft_tokens = numbers
    with pytest.raises(ConfigError, match="lower topk or num_steps") as caught:
        settle(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    assert caught.value.field == "topk"


@given(st.integers(1, 8), st.integers(1, 4))
def test_more_tokens_than_a_tree_can_grow_are_refused_by_name(num_steps: int, topk: int) -> None:
    most = most_tokens(num_steps, topk)
    if most < MAX_WINDOW:
        numbers = {"num_steps": num_steps, "topk": topk}
        assert settle(**numbers, num_draft_tokens=most).bounds == DraftShape(num_steps, topk, most)
        with pytest.raises(ConfigError, match=f"at most {most} tokens") as caught:
            settle(**numbers, num_draft_tokens=most + 1)
        assert caught.value.field == "num_draft_tokens"


@pytest.mark.parametrize(
    ("numbers", "most"),
    [({}, 6), ({"num_steps": 2}, 3), ({"topk": 1, "num_draft_tokens": 6}, 6), ({"num_draft_tokens": 2}, 2)],
)
def test_synthetic_acceptance_reaches_as_far_as_drafts_do(numbers: dict[str, int], most: int) -> None:
    rates = settle(**numbers, synthetic_acceptance=most).synthetic
    assert rates == pytest.approx((1.0,) * (most - 1))
    with pytest.raises(ConfigError, match=f"num_steps to at least {most}") as caught:
        settle(**numbers, synthetic_acceptance=most + 0.5)
    assert caught.value.field == "synthetic_acceptance"
    assert settle(synthetic_acceptance=[0.9, 0.2]).synthetic == (0.9, 0.2)
    assert settle().synthetic is None


@pytest.mark.parametrize(
    ("draft", "with_head", "without"),
    [
        ("auto", ("mtp", "suffix"), ("suffix",)),
        ("none", (), ()),
        ("mtp", ("mtp",), None),
        ("ngram", ("ngram",), ("ngram",)),
        ("suffix", ("suffix",), ("suffix",)),
        ("self-int4", ("self-int4",), ("self-int4",)),
        ("eagle", None, None),
    ],
)
def test_the_checkpoint_determines_the_drafters(
    draft: str, with_head: tuple[str, ...] | None, without: tuple[str, ...] | None
) -> None:
    for model, expected in ((WITH_HEAD, with_head), (WITHOUT_HEAD, without)):
        if expected is None:
            with pytest.raises(ConfigError) as caught:
                settle(model, draft=draft)
            assert caught.value.field == ("draft_model" if draft == "eagle" else "draft")
        else:
            assert settle(model, draft=draft).drafters == expected


def test_an_eagle_head_drafts_where_it_was_given() -> None:
    """In place of the model's own head; with suffixes, unless acceptance is synthetic."""
    for model in (WITH_HEAD, WITHOUT_HEAD):
        assert settle(model, eagle=EAGLE, draft="eagle").drafters == ("eagle",)
        assert settle(model, eagle=EAGLE, draft="auto").drafters == ("eagle", "suffix")
        assert settle(model, eagle=EAGLE, draft="auto", graphs=True).drafters == ("eagle", "suffix")
        assert settle(model, eagle=EAGLE, draft="auto", synthetic_acceptance=2.0).drafters == ("eagle",)
    assert settle(eagle=EAGLE, draft="eagle").layout.kv == (
        *settle(draft="none").layout.kv,
        KVShape(1, 8),
    )


def test_only_a_head_that_drafts_gets_keys_and_values() -> None:
    with_head, without = settle(draft="mtp").layout, settle(draft="suffix").layout
    assert len(with_head.kv) == len(without.kv) + 1


@pytest.mark.parametrize("slots", ["record", "snapshot"])
def test_draft_memory_is_reserved_if_there_is_a_drafter(slots: str) -> None:
    """Records of two windows: one is folded while the other is verified. States of one."""
    numbers = {"max_running": 4, "max_model_len": 64, "memory_bytes": None, "slots": slots}
    plain, drafting = settle(draft="none", **numbers), settle(draft="suffix", **numbers)
    layout = drafting.layout
    per_slab = layout.records_per_slab if slots == "record" else layout.states_per_slab
    more = drafting.memory_bytes - plain.memory_bytes
    windows = 2 if slots == "record" else 1
    assert more >= windows * 4 * drafting.bounds.num_draft_tokens // per_slab * layout.slab_bytes
    assert more % layout.slab_bytes == 0


def test_a_copy_that_drafts_is_counted_with_a_state_for_each_draft() -> None:
    numbers = {"max_running": 4, "max_model_len": 64, "memory_bytes": None}
    looked_up, copied = (settle(draft=name, topk=1, **numbers) for name in ("suffix", "self-int4"))
    assert copied.memory_bytes - looked_up.memory_bytes == 4 * copied.layout.slab_bytes


@pytest.mark.parametrize("shape", ["0.5b", "nemotron-h-8b"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copys_estimate_equals_its_footprint(shape: str, dtype: torch.dtype) -> None:
    described = network(SHAPES[shape])
    counted = measure(described, dtype, copied=True)
    sizes = described, dtype, dtype, counted.weight_bytes, 0
    assert copy_bytes(*sizes, kept=FORMATS["int4"]) == pytest.approx(counted.copy_bytes, rel=0.03)
    table = described.vocab * described.hidden * dtype.itemsize
    assert copy_bytes(*sizes, kept=None) == counted.weight_bytes - table


def test_a_copy_leaves_less_for_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: 256 << 20)
    held = []
    for draft in ("suffix", "self-int4"):
        config = EngineConfig.of(None, {"device": "cpu", "draft": draft, "kernels": "reference"})
        held.append(resolve(config, WITH_HEAD, torch.float32, 40 << 20, heads={}).memory_bytes)
    # The 128 bytes of 32 float32 weights become 16 bytes of integers and a 2-byte scale.
    assert (held[0] - held[1]) / 0.4 == pytest.approx((40 << 20) * 18 / 128, rel=0.02)


def test_a_copy_is_refused_by_name_where_it_cannot_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for fields, why in (
        ({"kernels": "triton"}, SELF_ON_GPU),
        ({"quantize": "int4"}, SELF_IS_TARGET),
        ({"graphs": True}, SELF_ON_DEVICE),
    ):
        with pytest.raises(ConfigError) as caught:
            settle(draft="self-int4", **fields)
        assert (caught.value.field, str(caught.value)) == (why.field, str(why))
    for tree in ({"topk": 2}, {"num_steps": 3, "num_draft_tokens": 6}):
        with pytest.raises(ConfigError, match=r"drafts chains only|num_steps=3 and topk=1 grow at most 4"):
            settle(draft="self-int4", **tree)
    assert settle(draft="self-int4").bounds == DraftShape(5, 1, 6)
    assert settle(draft="self-int4", quantize="int8").drafters == ("self-int4",)
    assert settle(draft="self-int4", synthetic_acceptance=2.5).synthetic


def test_the_longest_sequence_fills_the_arena() -> None:
    layout = settle().layout
    sequence = layout.slab_bytes * (1 + 1 + -(-layout.blocks_for(64) // layout.blocks_per_slab))
    assert settle(memory_bytes=sequence, max_model_len=64).max_model_len == 64
    assert 64 <= settle(memory_bytes=sequence).max_model_len < 512
    with pytest.raises(CapacityError) as caught:
        settle(memory_bytes=sequence - 1, max_model_len=64)
    assert caught.value.field == "memory_bytes"
    assert settle().max_model_len == 512
    with pytest.raises(ConfigError) as refused:
        settle(max_model_len=513)
    assert refused.value.field == "max_model_len"


def test_a_state_is_as_exact_as_the_model_and_never_less_than_float32() -> None:
    for dtype, state in (("float64", torch.float64), ("float32", torch.float32), ("bfloat16", torch.float32)):
        layout = settle(dtype=dtype).layout
        assert (layout.dtype, layout.state_dtype) == (getattr(torch, dtype), state)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kernels": "triton", "dtype": "float64"}, "kernels"),
        ({"kernels": "native", "dtype": "float64"}, "kernels"),
        ({"kernels": "flashinfer", "dtype": "bfloat16"}, "kernels"),
        ({"draft": "auto", "draft_model": "head"}, "draft_model"),
        ({"prefix_cache": False, "prefix_policy": "lru"}, "prefix_policy"),
        ({"prefix_cache": False, "host_cache_bytes": 1 << 20}, "host_cache_bytes"),
        ({"prefix_cache": False, "prefix_alpha": 0.5}, "prefix_alpha"),
        ({"prefix_alpha": 0.5}, "prefix_alpha"),
    ],
)
def test_unavailable_settings_are_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        settle(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "says", "not_says"),
    [
        ({"memory_bytes": 1000}, "; raise it.", "max_model_len"),
        ({"memory_bytes": 1000, "max_model_len": 64}, "; raise it.", "max_model_len"),
        (
            {"memory_bytes": 1_300_000, "max_model_len": 512},
            "; raise it or lower max_model_len.",
            "free some",
        ),
        ({"memory_bytes": None}, "; free some memory, or set memory_bytes.", "max_model_len"),
    ],
)
def test_too_little_memory_names_the_remedy(
    fields: dict[str, int], says: str, not_says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.setup.memory.free_memory", lambda device: 1000)
    with pytest.raises(CapacityError) as caught:
        settle(**fields)
    assert caught.value.field == "memory_bytes"
    assert says in str(caught.value) and not_says not in str(caught.value)


@pytest.mark.parametrize(
    ("narrow_bytes", "kernels", "quantize", "weight_bytes"),
    [
        (0, "cpu", None, 40 << 20),
        (0, "cpu", "fp8", 40 << 20),
        (0, "reference", "fp8", 10 << 20),
        (36 << 20, "cpu", None, 148 << 20),
        (36 << 20, "reference", None, 40 << 20),
        (36 << 20, "reference", "fp8", 37 << 20),
    ],
)
def test_memory_is_what_the_weights_leave(
    narrow_bytes: int, kernels: str, quantize: str | None, weight_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 MiB, 8-bit weights are loaded unchanged, or widened to float32 if the kernels need that."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 256 << 20)
    config = EngineConfig(device="cpu", dtype="float32", kernels=kernels, quantize=quantize, max_running=4096)
    settled = resolve(config, WITH_HEAD, torch.float32, 40 << 20, narrow_bytes)
    tables = SMALL["vocab_size"] * SMALL["hidden_size"] * 3 if quantize and kernels == "reference" else 0
    left = (256 << 20) - weight_bytes - tables
    assert settled.memory_bytes == pytest.approx(memory.AUTO_MEMORY_SHARE["cpu"] * left, rel=1e-3)
    assert settled.quantize == quantize
    kept = kernels == "reference" and (quantize or narrow_bytes > 0)
    assert settled.weights == ("fp8" if kept else None)


@pytest.mark.parametrize("quantize", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("shape", ["0.8b", "nemotron-h-8b"])
def test_the_weights_estimate_equals_the_footprint(shape: str, quantize: str | None) -> None:
    described, form = network(SHAPES[shape]), FORMATS[quantize] if quantize else None
    exact, held = (measure(described, torch.bfloat16, quantize=own) for own in (None, form))
    expected = weight_bytes(
        *(described, torch.bfloat16, torch.bfloat16, exact.weight_bytes, 0), quantize=quantize, kept=form
    )
    assert expected == pytest.approx(held.weight_bytes, rel=0.02)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kernels", ["native", "reference", "cpu", "triton"])
def test_integer_weights_stay_packed_if_a_kernel_multiplies_them(
    kernels: str, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    settled = settle(kernels=kernels, quantize=quantize)
    assert (settled.quantize, settled.weights) == (quantize, None if kernels == "cpu" else quantize)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_has_its_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without an index equals no tensor's device, and torch.cuda rejects it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert pick_device(name) == torch.device("cuda:1")
    assert pick_device("cuda:0") == torch.device("cuda:0")
