"""Throughput of random models of a shape: what fits, what is drawn, what is shown."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.bench.peers import Sample
from specdec.bench.random_model import shape_config
from specdec.bench.runner import EngineRunner
from specdec.config.engine import EngineConfig
from specdec.errors import CapacityError
from specdec.models import families
from specdec.models.shapes import SHAPES
from specdec.setup.build import build_random
from tests.selection import EXHAUSTIVE
from tools.bench import random_fit, random_run
from tools.bench.__main__ import main
from tools.bench.profile import idle_share, profile_steps, render
from tools.bench.random_fit import fit, fitting
from tools.bench.timing import Machine

SMALL = {**SHAPES["tiny"], "num_hidden_layers": 4, "vocab_size": 512}
"""A named shape that is drawn quickly."""
ARGV = ["random", "--shape", "small", "--dtype", "float32", "--device", "cpu", "--json"]
LOAD = ["--batch", "1,3", "--prompt-tokens", "9", "--new-tokens", "14", "--repeats", "1", "--warmup", "0"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(name: str) -> dict[str, Any]:
        return dict(SMALL) if name == "small" else shape_config(name)

    monkeypatch.setattr(random_fit, "shape_config", config)
    monkeypatch.setattr(random_run, "measure_machine", lambda device: Machine(1e10, 1e-6))


def report_of(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    captured = capsys.readouterr()
    return captured.err, json.loads(captured.out)


@pytest.mark.parametrize("draft", ["mtp", "self-int4"])
def test_report_covers_every_batch_with_and_without_drafts(
    draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGV, *LOAD, "--draft", draft, "--no-adaptive", "--num-steps", "2"]) == 0
    out, report = report_of(capsys)
    assert [case["batch"] for case in report["cases"]] == [1, 3]
    for case in report["cases"]:
        rows = case["batch"]
        assert case["agreement"] == {"rows": rows, "equal": rows}
        own, none = case["figures"]["specdec"], case["figures"]["specdec, draft none"]
        assert own["window"] == pytest.approx(3, abs=0.5) and none["window"] == 1
        assert none["over_none"]["median"] == 1 and none["tokens_per_step"]["median"] == 1
        assert own["floor_s"] > none["floor_s"] > 0
    row_bytes = report["memory"][0]["row_bytes"]
    assert row_bytes["record"] < row_bytes["snapshot"]
    assert "of ceiling" in out and "NO TEXT" in out and "random weights: drafts cannot gain here" in out


def test_synthetic_acceptance_is_reported_and_sets_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*ARGV, "--batch", "2", "--prompt-tokens", "5", "--new-tokens", "60", "--repeats", "1"]
    assert main([*argv, "--draft", "mtp", "--synthetic-acceptance", "3", "--no-adaptive"]) == 0
    out, report = report_of(capsys)
    (case,) = report["cases"]
    assert case["agreement"] is None
    assert 2.3 < case["figures"]["specdec"]["tokens_per_step"]["median"] < 3.7
    assert "SYNTHETIC" in out and "cannot gain" not in out


@pytest.mark.parametrize("name", ["tiny", "0.5b"])
@EXHAUSTIVE
def test_random_weights_replace_a_checkpoint(name: str) -> None:
    config = EngineConfig(device="cpu", max_model_len=32, max_running=1, draft="none")
    raw = shape_config(name)
    stored = families.stored_dtype(raw)
    said = []
    for _ in range(2 if name == "tiny" else 1):
        model = build_random(families.network(raw), config, stored=stored, stored_bytes=1 << 30, seed=3)
        assert model.tokenizer is None
        said.append(EngineRunner(model).run([[5, 6, 7]], 3).token_ids)
    assert said[0] is not None and len(said[0][0]) == 4
    assert said[0] == said[-1]


def test_a_shape_that_does_not_fit_is_refused_before_drawing_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_fit, "free_memory", lambda device: 8 << 30)

    def draws(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing may be drawn")

    monkeypatch.setattr(random_run, "build_random", draws)
    argv = ["random", "--shape", "qwen3.5-27b", "--device", "cpu", "--json"]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert "qwen3.5-27b" in said and f"{8 << 30:,}" in said
    # If weights fit and rows do not, the rows are named.
    found = fit("small", EngineConfig(device="cpu", max_model_len=64))
    assert fitting(found, [1, 1 << 40], 64) == [1]
    with pytest.raises(CapacityError, match="rows of 64 tokens"):
        fitting(found, [1 << 40], 64)


@pytest.mark.parametrize("draft", ["mtp", "self-int4"])
def test_rows_that_are_said_to_fit_do(draft: str) -> None:
    """The counted number of rows runs at once, without preemption."""
    config = EngineConfig(device="cpu", max_model_len=40, draft=draft, adaptive=False, dtype="float32")
    found = fit("small", config)
    for rows in (1, 7):
        memory = found.memory_for(rows, 40)
        room = {"memory_bytes": memory, "max_running": rows}
        model = build_random(
            found.model.network,
            EngineConfig.of(config, room),
            stored=found.stored,
            stored_bytes=found.stored_bytes,
            seed=0,
        )
        runner = EngineRunner(model)
        runner.run([[row + 1] * 20 for row in range(rows)], 19)
        limits = dict(model.loop.scheduler.limited_by)
        assert not {"draft slots", "draft blocks", "KV blocks", "state slots"} & limits.keys(), limits
        assert memory < 3 * rows * found.row_bytes(40, "record") + 12 * found.settings.layout.slab_bytes


def test_different_tokens_with_drafts_show_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = EngineRunner.run

    def wrong(self: EngineRunner, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        sample = right(self, prompts, new_tokens)
        if not self.model.settings.drafters or sample.token_ids is None:
            return sample
        ids = ((*sample.token_ids[0][:-1], 1 + sample.token_ids[0][-1] % 500), *sample.token_ids[1:])
        return Sample(sample.prefill_s, sample.step_s, ids, sample.tokens_per_step)

    monkeypatch.setattr(EngineRunner, "run", wrong)
    assert main([*ARGV, *LOAD]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "1 of 1 rows" in captured.err


@pytest.mark.parametrize("graphs", [False, True])
def test_profile_names_what_took_the_time(graphs: bool) -> None:
    raw = dict(SMALL)
    config = EngineConfig(device="cpu", max_model_len=128, draft="none", graphs=graphs, dtype="float32")
    model = build_random(families.network(raw), config, stored=torch.float32, stored_bytes=1, seed=0)
    found = profile_steps(EngineRunner(model), [[5, 6], [7, 8]])
    assert found["steps"] > 0 and found["rows"] == 2 and found["idle_share"] is None
    shares = [own["share"] for own in found["kernels"]]
    assert shares == sorted(shares, reverse=True) and 0.5 < sum(shares) <= 1 + 1e-9
    assert any("mm" in own["name"] or "linear" in own["name"] for own in found["kernels"])
    assert "profiled steps run without tapes" in render(found)
    model.loop.arena.check_integrity()


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], 1),
        ([(0, 4)], 0),
        ([(0, 1), (3, 4)], 0.5),
        ([(0, 3), (1, 2), (2, 4)], 0),
        ([(2, 3), (0, 1)], 1 / 3),
    ],
    ids=str,
)
def test_idle_share_is_the_time_without_kernels(spans: list[tuple[float, float]], idle: float) -> None:
    assert idle_share(spans) == pytest.approx(idle)


def test_eight_bits_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    load = [*LOAD, "--batch", "1", "--draft", "none", "--dtype", "bfloat16", "--quantize", "fp8"]
    assert main([*ARGV, *load]) == 0
    out, report = report_of(capsys)
    assert report["quantize"] == "fp8" and report["rounding"] == "bfloat16 and 8-bit weights"
    assert "matrices in fp8" in out


@pytest.mark.parametrize(("quantize", "bits"), [("int8", 8), ("int4", 4)])
def test_fewer_bits_are_fewer_bytes(quantize: str, bits: int, capsys: pytest.CaptureFixture[str]) -> None:
    load = [*LOAD, "--batch", "1", "--draft", "none", "--dtype", "bfloat16"]
    assert main([*ARGV, *load]) == 0
    _, wide = report_of(capsys)
    assert main([*ARGV, *load, "--quantize", quantize]) == 0
    out, narrow = report_of(capsys)
    assert narrow["rounding"] == f"bfloat16 and {bits}-bit weights" and f"matrices in {quantize}" in out
    assert narrow["weight_bytes"] < wide["weight_bytes"]
    eight, all_bits = (report["cases"][0]["figures"]["specdec"]["floor_s"] for report in (narrow, wide))
    assert eight < all_bits


def test_ctrl_c_shows_the_cases_that_were_finished(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage over its limit is interrupted this way; its measurements must not be lost."""
    run = EngineRunner.run

    def pressed(self: EngineRunner, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        if len(prompts) == 3:
            raise KeyboardInterrupt
        return run(self, prompts, new_tokens)

    monkeypatch.setattr(EngineRunner, "run", pressed)
    assert main([*ARGV, *LOAD, "--draft", "mtp", "--no-adaptive", "--num-steps", "2"]) == 130
    out, report = report_of(capsys)
    assert [case["batch"] for case in report["cases"]] == [1]
    assert report["interrupted"] and "INTERRUPTED after 1 cases" in out
