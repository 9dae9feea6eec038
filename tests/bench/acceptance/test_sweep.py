"""The settings of a sweep: each requested combination once, and refusals of required parts by name."""

from dataclasses import replace

import pytest

from specdec.bench.acceptance.settings import DEFAULT_BOUNDS, Drafting, Setting, SettingGroup, Sweep, widest
from specdec.config.engine import EngineConfig
from specdec.draft.proposal import DraftShape
from specdec.setup.resolve import bounds_of

CHAIN, TREE, BOUNDS = DraftShape(4, 1, 5), DraftShape(4, 4, 16), DraftShape(5, 4, 8)


def sweep(**changes: object) -> Sweep:
    asked: dict[str, object] = {
        "drafts": ["mtp", "suffix"],
        "shapes": [CHAIN, TREE],
        "chosen": None,
        "temperatures": [0.0, 1.0],
        "batches": [1],
        "noises": ["shared", "none"],
        "transformers": False,
    }
    return Sweep(**{**asked, **changes})  # type: ignore[arg-type]


def names(settings: list[Setting]) -> list[str]:
    return [setting.name for setting in settings]


def test_noise_is_swept_above_temperature_zero() -> None:
    asked = sweep(chosen=BOUNDS)
    draftings, left_out = asked.draftings()
    assert left_out == []
    shapes = ["4x1", "4x4:16"]
    shared = [*(f"mtp {s}" for s in shapes), "mtp chosen", *(f"suffix {s}" for s in shapes), "suffix chosen"]
    greedy, sampled = (asked.settings(SettingGroup(t, 1), draftings) for t in (0.0, 1.0))
    assert names(greedy) == ["none", *shared]
    assert sorted(names(sampled)) == sorted(["none", *shared, *(f"mtp {s} plain" for s in shapes)])
    # With noise "none" alone a greedy text is still drafted, once.
    alone = sweep(noises=["none"])
    assert names(alone.settings(SettingGroup(0.0, 1), alone.draftings()[0]))[1:3] == ["mtp 4x1", "mtp 4x4:16"]


def test_the_engines_default_is_measured_first_and_once() -> None:
    default = Drafting("auto", DEFAULT_BOUNDS, chosen=True)
    for chosen, bounds in ((None, DEFAULT_BOUNDS), (BOUNDS, BOUNDS)):
        draftings, _ = sweep(drafts=["auto"], chosen=chosen, noises=["shared"]).draftings()
        assert draftings[0] == replace(default, shape=bounds)
        assert [d.name for d in draftings] == ["auto chosen", "auto 4x1", "auto 4x4:16"]
    resolved, plain = (bounds_of(EngineConfig.of(None, given)) for given in (default.fields(), {}))
    assert resolved == plain


def test_economies_are_swept_for_heads() -> None:
    asked = sweep(shapes=[CHAIN], chosen=BOUNDS, noises=["shared"], vocabs=[None, 64], windows=[None, 32])
    draftings, _ = asked.draftings()
    heads = ["", " window 32", " vocab 64", " vocab 64 window 32"]
    own = [f"mtp {shape}{spared}" for shape in ("4x1", "chosen") for spared in heads]
    assert [d.name for d in draftings] == [*own, "suffix 4x1", "suffix chosen"]
    last = Setting(draftings[len(own) - 1], SettingGroup(0.0, 1)).describe()
    assert (last["draft_vocab"], last["draft_window"]) == (64, 32)


def test_shapes_no_drafter_supports_are_skipped_by_name() -> None:
    draftings, left_out = sweep(
        drafts=["mtp"], shapes=[CHAIN, DraftShape(2, 1, 9), DraftShape(40, 4, 50)]
    ).draftings()
    assert {d.shape for d in draftings} == {CHAIN}
    assert len(left_out) == 4
    assert left_out[0].startswith("mtp 2x1:9: num_draft_tokens") and "topk" in left_out[1]


def test_transformers_takes_part_where_it_can() -> None:
    asked = sweep(transformers=True, batches=[1, 4])
    draftings, left_out = asked.draftings()
    assert "transformers" in left_out[0]
    assert names(asked.settings(SettingGroup(0.0, 1), draftings))[-1] == "transformers"
    assert "transformers" not in names(asked.settings(SettingGroup(0.0, 4), draftings))
    assert [str(group) for group in asked.groups()][:2] == [
        "temperature 0, batch 1",
        "temperature 0, batch 4",
    ]


def test_plain_decoding_is_measured_only_once() -> None:
    draftings, _ = sweep(drafts=["none", "mtp"]).draftings()
    assert {d.draft for d in draftings} == {"mtp"}


@pytest.mark.parametrize("shapes", [[CHAIN, TREE], [DraftShape(16, 1, 17), DraftShape(4, 8, 64)]])
def test_the_widest_shape_holds_the_most_tokens(shapes: list[DraftShape]) -> None:
    fields = widest([Drafting("mtp", shape) for shape in shapes], "mtp")
    bounds = bounds_of(EngineConfig.of(None, fields))
    assert bounds.num_draft_tokens == max(shape.num_draft_tokens for shape in shapes)


def test_settings_are_labelled() -> None:
    said = Setting(Drafting("mtp", TREE, noise=False), SettingGroup(0.7, 3)).describe()
    assert said == {
        "draft": "mtp",
        "num_steps": 4,
        "topk": 4,
        "num_draft_tokens": 16,
        "temperature": 0.7,
        "batch": 3,
        "chosen": False,
        "draft_noise": False,
        "draft_vocab": None,
        "draft_window": None,
    }
