"""The bytes of a step against figures counted by hand, and against each other."""

import json
from dataclasses import replace

import pytest
import torch

from specdec.errors import ConfigError
from specdec.kernels.linear import fp8
from specdec.models.families import network
from specdec.models.shapes import SHAPES
from tools.bench.__main__ import main
from tools.bench.time_model import StepWork, TimeModel, describe, state_bytes

BANDWIDTH = 4.3e12
"""Copy bandwidth of an H200."""
COUNTED = {
    # window, draft steps, topk, accepted: GB of the target, ms of a step, tokens per second
    (3, 2, 1, 2.709): (7.0, 1.97, 1374),
    (4, 3, 1, 3.413): (8.4, 2.47, 1380),
    (8, 4, 4, 4.231): (13.9, 3.99, 1061),
}
LARGE = network(SHAPES["qwen3-next-80b-a3b"])


@pytest.mark.parametrize(("load", "counted"), COUNTED.items(), ids=str)
def test_the_cost_of_a_large_model_equals_the_count(
    load: tuple[int, int, int, float], counted: tuple[float, float, float]
) -> None:
    window, steps, topk, accepted = load
    work = StepWork(window=window, draft_steps=steps, topk=topk, accepted=accepted)
    found = describe(LARGE, work, BANDWIDTH, quantize="fp8")
    assert found["target_bytes"] / 1e9 == pytest.approx(counted[0], rel=0.01)
    # The hand count has each pass of the head use one token's experts in 16 bits; ours uses those of all
    # accepted tokens, or of topk tokens, in 8.
    assert 0.99 < found["floor_s"] * 1e3 / counted[1] < 1.03
    assert 0.97 < found["ceiling_tokens_per_s"] / counted[2] < 1.01


def test_tokens_share_the_experts_they_have_in_common() -> None:
    model = TimeModel(LARGE)
    one, all_of_them = model.step(StepWork())["experts"], model.step(StepWork(rows=512, window=16))["experts"]
    moe = LARGE.layers[0].ffn
    assert moe is not None and hasattr(moe, "experts") and hasattr(moe, "top_k")
    assert one == pytest.approx(all_of_them * moe.top_k / moe.experts, rel=1e-6)
    two = model.step(StepWork(window=2))["experts"]
    assert one < two < 2 * one


def test_bytes_add_up_to_the_footprints() -> None:
    for name in ("tiny", "qwen3.5-35b-a3b", "nemotron-h-8b"):
        model = TimeModel(network(SHAPES[name]))
        moved = model.step(StepWork(rows=3, window=5))
        of_memory = {"states", "keys and values"}
        weights = sum(size for kind, size in moved.items() if kind not in of_memory)
        assert weights == pytest.approx(model.footprint.step_bytes(15))
        assert model.weight_bytes(mtp=False) == model.footprint.weight_bytes


def test_a_copy_has_its_own_state() -> None:
    """Each draft token reads all of the copy's weights and moves a state, which is copied once before."""
    shape = network(SHAPES["0.5b"])
    plain, copied = TimeModel(shape), TimeModel(shape, copied=True)
    work = StepWork(rows=2, window=4)
    assert copied.step(work) == plain.step(work)
    none, two, three = (
        copied.step(replace(work, draft_steps=steps)).get("draft steps", 0.0) for steps in (0, 2, 3)
    )
    state = 2 * 2 * copied.layout.state_bytes
    assert none == 0 and three - two > copied.footprint.copy_bytes + state
    assert 3 * (three - two) + state == pytest.approx(three)
    held = copied.weight_bytes(mtp=False) - plain.weight_bytes(mtp=False)
    assert held == copied.footprint.copy_bytes > 0


def test_fp8_halves_the_matrices_of_layers_alone() -> None:
    models = [TimeModel(LARGE, quantize=form) for form in (None, fp8)]
    wide, narrow = (model.step(StepWork(window=4, draft_steps=3)) for model in models)
    halved = {kind for kind in wide if narrow[kind] == pytest.approx(wide[kind] / 2, rel=2.5e-4)}
    assert halved == {"experts"}
    # A delta net's gate projections, the shared expert's gate, and norms stay unquantized.
    for kind in ("attention projections", "recurrent projections", "dense feed-forward"):
        assert 0.5 < narrow[kind] / wide[kind] < 0.51
    assert 0.5 < narrow["draft steps"] / wide["draft steps"] < 1
    for kind in ("output matrix", "routers", "norms", "states"):
        assert narrow[kind] == wide[kind]


@pytest.mark.parametrize("window", [4, 8, 16])
def test_records_move_two_states_for_any_window(window: int) -> None:
    layout = TimeModel(LARGE).layout
    state, record = layout.state_bytes, layout.record_bytes
    assert state_bytes(layout, window, "record") == 2 * state + 2 * window * record
    assert state_bytes(layout, window, "snapshot") == (window + 1) * state
    assert state_bytes(layout, window, "record") < state_bytes(layout, window, "snapshot")


def test_context_is_read_once_a_row() -> None:
    model = TimeModel(LARGE, torch.bfloat16)
    short, long = (model.step(StepWork(rows=2, window=4, context=n))["keys and values"] for n in (0, 1000))
    attentions = 12
    assert long - short == attentions * 2 * 1000 * 2 * 2 * 256 * 2


def test_command_prints_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model", "--shape", "qwen3-next-80b-a3b", "--quantize", "fp8", "--window", "4", "--json"]
    assert main([*argv, "--bandwidth", "4.3e12", "--acceptance", "3.413"]) == 0
    captured = capsys.readouterr()
    out, report = captured.err, json.loads(captured.out)
    assert report["floor_s"] == pytest.approx(2.5e-3, rel=0.02)
    assert "experts" in out and "tokens/s" in out
    first, _, columns = out.splitlines()[:3]
    assert first.startswith("qwen3-next-80b-a3b: batch 1, a window of 4 tokens") and "(" not in first
    assert columns.split()[0] == "part"


def test_report_contains_the_requested_figures(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"batch": 2, "window": 6, "context": 50, "acceptance": 2.5, "draft_steps": 4, "draft_topk": 3}
    words = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["model", *words, "--slots", "snapshot", "--bandwidth", "4.3TB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    asked |= {"quantize": None, "slots": "snapshot", "bytes_per_s": 4.3e12, "shape": "qwen3-next-80b-a3b"}
    assert {name: report[name] for name in asked} == asked


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--acceptance", value) for value in ("nan", "inf", "0.9", "5", "0")),
        *(("--bandwidth", value) for value in ("0", "-1", "nan", "inf", "1e999", "fast", "1.2.3")),
        ("--out", "."),
    ],
)
def test_inputs_out_of_range_are_refused_by_name(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "--window", "4", f"{option}={value}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(
        (f"specdec: {option}: ", f"specdec: {option} cannot be")
    )


def test_draft_steps_without_a_head_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="head"):
        describe(network(SHAPES["nemotron-h-8b"]), StepWork(draft_steps=1), BANDWIDTH)
    assert main(["model", "--shape", "nemotron-h-8b", "--draft-steps", "2"]) == 2
    assert main(["model", "--bandwidth", "0"]) == 2
    assert "--bandwidth" in capsys.readouterr().err
