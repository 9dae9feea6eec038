import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.bench import throughput
from specdec.bench.agreement import rounding
from specdec.bench.bandwidth import BandwidthProbe, cache_bytes
from specdec.bench.peers import Sample, TransformersPeer
from specdec.bench.random_model import shape_config, write_random_checkpoint
from specdec.bench.runner import EngineRunner
from specdec.bench.throughput import EXCUSED_GAP
from specdec.cli import main
from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError
from specdec.models.formats import QuantisationConfig

SIZES = ["--batch", "1,3", "--prompt-tokens", "5,33", "--new-tokens", "4"]
CASES = [(1, 5), (1, 33), (3, 5), (3, 33)]
RUNS = ["--dtype", "float32", "--repeats", "2", "--warmup", "0"]


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "BandwidthProbe", lambda device: BandwidthProbe(device, 1 << 20))


def run(folder: Path, *more: str) -> int:
    return main(["bench", "throughput", str(folder), *SIZES, *RUNS, "--json", *more])


def report_of(out: str) -> dict[str, Any]:
    return json.loads(out)


def test_report_has_every_case_and_contestant(
    hybrid: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "report.json"
    assert run(hybrid, "--peers", "transformers", "--out", str(kept)) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert json.loads(kept.read_text()) == report
    assert [(case["batch"], case["prompt_tokens"]) for case in report["cases"]] == CASES
    for case in report["cases"]:
        assert case["agreement"]["tokens"] == case["batch"] * 5
        assert set(case["figures"]) == {"specdec", "specdec, draft none", "transformers"}
        own = case["figures"]["specdec"]
        assert own["decode_speedup"]["median"] == own["prefill_speedup"]["median"] == 1
        assert own["bandwidth_share"] > 0
    assert {"commit", "cpu", "versions", "dtype", "seed", "warmup", "repeats", "settings"} <= report.keys()
    assert "transformers" in captured.err.splitlines()[-4]


def test_a_speedup_above_one_is_faster(hybrid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(hybrid, "--draft", "none", "--peers", "transformers", "--repeats", "1") == 0
    figures = report_of(capsys.readouterr().out)["cases"][0]["figures"]
    own, peer = figures["specdec"], figures["transformers"]
    assert peer["decode_tokens_per_s"] != own["decode_tokens_per_s"]
    for phase in ("prefill", "decode"):
        ratio = peer[f"{phase}_tokens_per_s"] / own[f"{phase}_tokens_per_s"]
        low, high = peer[f"{phase}_speedup"]["p10"], peer[f"{phase}_speedup"]["p90"]
        assert low == high == pytest.approx(ratio, rel=1e-4), "one repeat has one quotient"


def test_wrong_token_shows_no_figure(
    hybrid: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = EngineRunner.run

    def wrong(self: EngineRunner, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        sample = right(self, prompts, new_tokens)
        assert sample.token_ids is not None
        *rows, last = sample.token_ids
        return Sample(sample.prefill_s, sample.step_s, (*rows, (*last[:-1], (last[-1] + 1) % 320)))

    monkeypatch.setattr(EngineRunner, "run", wrong)
    assert run(hybrid) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "1 of 5 greedy tokens differ" in captured.err


@pytest.mark.parametrize("gap", [2 * EXCUSED_GAP, float("nan"), float("inf")])
def test_check_excuses_rounding_alone(gap: float) -> None:
    throughput._refuse(torch.tensor([[0.0, EXCUSED_GAP / 2]]), "transformers")
    with pytest.raises(throughput.EngineError, match=r"row 0 at output token 1"):
        throughput._refuse(torch.tensor([[0.0, gap]]), "transformers")


def test_runner_times_each_step_in_which_all_rows_decode(hybrid: Path) -> None:
    # Three prompts of 33 tokens take several chunks of 16, during which the first rows already decode.
    runner = EngineRunner.load(hybrid, EngineConfig(chunk_tokens=16, dtype="float32", max_model_len=64))
    prompts = [[i, *range(100, 132)] for i in range(3)]
    chunked = runner.run(prompts, 12)
    whole = EngineRunner.load(hybrid, EngineConfig(dtype="float32", max_model_len=64)).run(prompts, 12)
    assert chunked.token_ids == whole.token_ids
    assert len(whole.step_s) == 12
    assert 0 < len(chunked.step_s) < 12
    runner.model.loop.arena.check_integrity()


def test_bandwidth_probe_reads_the_bytes_it_reports() -> None:
    assert BandwidthProbe(torch.device("cpu"), 1 << 16).bytes_per_second() > 0


def test_interrupt_keeps_finished_cases(
    hybrid: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    right = EngineRunner.run

    def stop(self: EngineRunner, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        if (len(prompts), len(prompts[0])) == CASES[2]:
            raise KeyboardInterrupt
        return right(self, prompts, new_tokens)

    monkeypatch.setattr(EngineRunner, "run", stop)
    kept = tmp_path / "report.json"
    assert run(hybrid, "--out", str(kept)) == 130
    captured = capsys.readouterr()
    report = report_of(captured.out)
    assert json.loads(kept.read_text()) == report
    assert [(case["batch"], case["prompt_tokens"]) for case in report["cases"]] == CASES[:2]
    assert report["interrupted"]
    assert "INTERRUPTED: these 2 cases" in captured.err
    assert "Traceback" not in captured.err


def test_interrupt_before_the_first_case_shows_no_table(
    hybrid: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineRunner, "run", stop)
    assert run(hybrid) == 130
    assert capsys.readouterr().out == ""


def test_progress_shows_case_and_total(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Bar(throughput.tqdm):  # type: ignore[misc, name-defined]
        def set_description(self, desc: str, refresh: bool = True) -> None:
            said.append(desc)

    monkeypatch.setattr(throughput, "tqdm", Bar)
    assert run(hybrid) == 0
    assert said[1] == "case 2 of 4: batch 1, prompt 33" and len(said) == 4


@pytest.mark.parametrize(
    ("weight_bytes", "share", "shown"),
    [(99, 0.5, "in the cache"), (101, 1.2, "in the cache"), (101, 0.5, "50%")],
)
def test_no_bandwidth_share_is_reported_within_a_cache(
    weight_bytes: int, share: float, shown: str, hybrid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(hybrid) == 0
    report = report_of(capsys.readouterr().out)
    report |= {"cache_bytes": 100, "weight_bytes": weight_bytes}
    for case in report["cases"]:
        for figures in case["figures"].values():
            figures["bandwidth_share"] = share
    assert {row["bandwidth"] for row in throughput._rows(report)} == {shown}


def test_last_level_cache_is_found_or_none() -> None:
    assert cache_bytes(torch.device("cpu")) >= 0


def test_a_run_does_not_draft_from_the_previous_output(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, shape_config("tiny"), seed=0)
    runner = EngineRunner.load(tmp_path, EngineConfig(draft="suffix", adaptive=False, max_model_len=64))
    lengths = [runner.run([[5, 6, 7]], 24).tokens_per_step for _ in range(3)]
    assert lengths[0] == lengths[1] == lengths[2] < 2


def test_a_batch_that_never_decodes_together_is_refused_by_name(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, shape_config("tiny"), seed=0)
    runner = EngineRunner.load(tmp_path, EngineConfig(draft="none", chunk_tokens=4, max_model_len=64))
    with pytest.raises(ConfigError, match="lower batch") as caught:
        runner.run([[5, 6, 7]] * 12, 2)
    assert caught.value.field == "batch"


def test_a_batch_of_more_prompt_tokens_than_a_chunk_decodes_together(hybrid: Path) -> None:
    # In chunks of 512 the first row would end, after its second token, before the last one is prefilled.
    assert run(hybrid, "--batch", "9", "--prompt-tokens", "120", "--new-tokens", "1") == 0


@pytest.mark.parametrize("eight_bit", [["--quantize", "fp8"], ["--kv-dtype", "fp8"]], ids=str)
def test_requested_quantisation_is_reported_and_accepted(
    eight_bit: list[str],
    hybrid: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def judge(self: TransformersPeer, prompts: object, outputs: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.full((len(outputs), len(outputs[0])), 0.25)

    monkeypatch.setattr(TransformersPeer, "judge", judge)
    assert run(hybrid, *eight_bit) == 0
    captured = capsys.readouterr()
    report = report_of(captured.out)
    assert (
        report["rounding"].startswith("8-bit") and f"informational with {report['rounding']}" in captured.err
    )
    assert {case["agreement"]["largest_gap"] for case in report["cases"]} == {0.25}
    assert run(hybrid) == 2


def test_quantisation_is_named(hybrid: Path) -> None:
    settings = EngineRunner.load(hybrid, EngineConfig(dtype="float32", max_model_len=16)).model.settings
    assert rounding(settings) == ""
    assert rounding(settings, QuantisationConfig("fp8")) == "8-bit weights"
    assert rounding(settings, QuantisationConfig("gptq")) == "gptq weights"
    assert rounding(replace(settings, dtype=torch.bfloat16, quantize="int4")) == "bfloat16 and 4-bit weights"


def test_a_length_below_the_measured_range_is_refused_by_name(
    hybrid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(hybrid, "--max-model-len", "37") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "--max-model-len: 37 is less than the 38 tokens" in captured.err
    assert run(hybrid, "--max-model-len", "38") == 0


def test_a_model_and_a_shape_are_not_measured_at_once(
    hybrid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(hybrid, "--shape", "tiny") == 2
    assert "shape" in capsys.readouterr().err


def test_several_ranks_are_refused_by_name(hybrid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its engine without drafts shares the weights; other ranks would not run its steps."""
    assert run(hybrid, "--tp", "2") == 2
    assert "--tp: this benchmark measures one process" in capsys.readouterr().err
