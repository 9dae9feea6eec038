"""The benchmark of single operations: wrong results get no figure, and bytes follow the formulas."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.bench.report import ReportOutput, publish
from specdec.errors import ConfigError
from specdec.kernels.group import RecurrentMemory
from specdec.kernels.table import OPERATIONS, replaced
from specdec.models.mixers.gated_delta_net import GatedDeltaNet
from tests.kernels import problems as networks
from tests.kernels.problems import NETWORKS
from tools.bench.timing import Machine, measure_machine, time_calls
from tools.kernels import bench as kernels
from tools.kernels import traffic, window_problems
from tools.kernels.__main__ import main
from tools.kernels.bench import ONCE, TOLERANCE, measure
from tools.kernels.options import KernelOptions
from tools.kernels.problems import Bench, Planned, row_error

CPU = torch.device("cpu")
SHAPES = [name for name in NETWORKS if name != "tiny"]
MACHINE = Machine(1e10, 1e-6)


def bench_of(name: str, dtype: torch.dtype = torch.float32) -> Bench:
    return networks.bench_of(name, CPU, dtype)


def problems(bench: Bench, name: str, *, batch: int = 3, window: int = 5) -> list[Planned]:
    return list(networks.problems(bench, name, batch=batch, window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["cpu", "native"])
@pytest.mark.parametrize("shape", SHAPES)
def test_right_kernels_are_found_right(shape: str, name: str, dtype: torch.dtype) -> None:
    bench = bench_of(name, dtype)
    for batch, window in ((1, 1), (3, 5)):
        for problem in problems(bench, shape, batch=batch, window=window):
            row = measure(bench, MACHINE, problem, 1)
            assert row["status"] == "ok", row
            assert row["bytes"] > 0 and row["seconds"]["median"] > 0


def test_every_operation_of_a_step_has_a_problem() -> None:
    bench = bench_of("cpu")
    planned = {p.operation for name in NETWORKS for p in problems(bench, name)}
    measured = planned | set(ONCE)
    assert {
        "linear", "rms_norm", "add_rms_norm", "gated_norm", "self_attention", "move", "causal_conv",
        "path_conv", "scan_window", "fold", "delta_net", "path_keys", "mamba", "mamba_keys", "swiglu",
        "relu2", "selective_scan", "fold_selective", "route_softmax", "route_sigmoid", "experts", "gumbel",
        "process", "sample", *ONCE,
    } == measured  # fmt: skip
    assert planned <= {*OPERATIONS}


def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with an error in one entry of its last row's result, or of the memory it writes."""

    def run(*args: Any, **settings: Any) -> Any:
        out = function(*args, **settings)
        told = out if not isinstance(out, tuple) else out[1]
        if told is None:  # it changes an argument, pages or a memory, at the next argument's ids
            at = next(i for i, x in enumerate(args) if isinstance(x, torch.Tensor | RecurrentMemory))
            told = args[at]
            if isinstance(told, RecurrentMemory):
                told = next(view for view in told if view.numel())
            told[args[at + 1].flatten()[-1]] += 1
        else:
            told[-1] += 1
        return out

    return run


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_that_is_wrong_in_one_row_gets_no_figure(shape: str) -> None:
    bench = bench_of("cpu")
    right = bench.kernels
    for problem in problems(bench, shape):
        mutant = replaced(right, **{problem.operation: wrong(getattr(right, problem.operation))})
        again = {
            (p.operation, p.detail): p for p in problems(replace(bench, kernels=mutant), shape)
        }[problem.operation, problem.detail]  # fmt: skip
        row = measure(replace(bench, kernels=mutant), MACHINE, again, 1)
        assert row["status"] == "WRONG", row
        assert "seconds" not in row


@pytest.mark.parametrize("field", ["state_SHKW", "window_SIC", "update_SRHW", "decay_SRH", "input_SRC"])
def test_written_memory_is_compared(field: str) -> None:
    bench = bench_of("cpu")
    right = bench.kernels.delta_net

    def forgets(projected: Any, layer: Any, memory: Any, group: Any) -> Any:
        before = getattr(memory, field).clone()
        out = right(projected, layer, memory, group)
        getattr(memory, field).copy_(before)
        return out

    mutant = replace(bench, kernels=replaced(bench.kernels, delta_net=forgets))
    rows = [
        measure(mutant, MACHINE, problem, 1)
        for problem in problems(mutant, "experts")
        if problem.operation == "delta_net" and problem.backing == "record"
    ]
    assert [row["status"] for row in rows] == ["WRONG"]


def test_a_wrong_tree_mask_is_seen() -> None:
    bench = bench_of("cpu")
    right = bench.kernels.self_attention

    def sees_siblings(projected: Any, layer: Any, rotation: Any, pages: Any, group: Any) -> Any:
        everything = torch.ones_like(group.ancestors_BMM).tril()
        return right(projected, layer, rotation, pages, replace(group, ancestors_BMM=everything))

    mutant = replace(bench, kernels=replaced(bench.kernels, self_attention=sees_siblings))
    (problem,) = (p for p in problems(mutant, "experts") if p.operation == "self_attention")
    assert measure(mutant, MACHINE, problem, 1)["status"] == "WRONG"


@pytest.mark.parametrize("shape", SHAPES)
def test_gpu_operations_are_measured_like_others(shape: str) -> None:
    """Once each with the default backing: an interpreter runs them without a GPU."""
    bench = bench_of("triton")
    planned = [p for p in problems(bench, shape, batch=1, window=2) if p.backing in ("", "record")]
    errors = {(p.operation, p.detail): p.build().error() for p in planned}
    assert {name: error for name, error in errors.items() if not error < TOLERANCE[torch.float32]} == {}


def test_an_error_is_reported_and_other_cases_continue() -> None:
    bench = bench_of("cpu")

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel\nmore")

    mutant = replace(bench, kernels=replaced(bench.kernels, swiglu=fails))
    problem = next(p for p in problems(mutant, "tiny") if p.operation == "swiglu")
    row = measure(mutant, MACHINE, problem, 1)
    assert (row["status"], row["why"]) == ("FAILED", "RuntimeError: no such kernel")


def test_unsupported_cases_are_skipped_by_name() -> None:
    bench = bench_of("cpu")
    problem = replace(problems(bench, "tiny")[0], needs=1 << 60)
    row = measure(bench, MACHINE, problem, 1)
    assert row["status"] == "skipped" and "needs" in row["why"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_row_error_is_of_the_worst_row(value: float) -> None:
    right = torch.ones(3, 4)
    found = right.clone()
    assert row_error(found, right) == 0
    found[1, 2] += value
    assert row_error(found, right) > max(TOLERANCE.values())


def test_bytes_follow_the_formulas() -> None:
    """Derived from an arena's layout of the same layer."""
    (mixer,) = NETWORKS["experts"].layers[0].mixers
    assert isinstance(mixer, GatedDeltaNet)
    size = traffic.recurrent(mixer.state_shape(), 4)
    assert size.state == 4 * 16 * 8 * 4
    assert size.record == (4 * 8 + 4) * 4 + (2 * 2 * 16 + 4 * 8) * 4
    for rows, width, path in ((1, 4, 2), (64, 8, 4)):
        whole = size.state + size.window
        assert traffic.states(size, rows, width, path, "plain") == 2 * rows * whole
        assert traffic.states(size, rows, width, path, "snapshot") == (width + 1) * rows * whole
        record = traffic.states(size, rows, width, path, "record")
        assert record == 2 * rows * whole + rows * (width + path) * size.record
        assert traffic.scan_window(size, rows, width, path, "snapshot") == (width + 1) * rows * size.state


def test_windows_of_drafts_are_trees() -> None:
    assert window_problems.tree(2).is_chain
    assert not window_problems.tree(4).is_chain
    assert max(window_problems.tree(15).depths) == 3


def test_timing_runs_every_call_in_turn() -> None:
    called = []
    timing = time_calls([lambda: called.append(0), lambda: called.append(1)], CPU, 4)
    assert timing.how == "clock"
    assert called[1:] == [0, 1, 0, 1]
    machine = measure_machine(CPU, 1 << 16)
    assert machine.copy_bytes_per_s > 0 and machine.launch_s > 0
    assert machine.predict_s(0) == machine.launch_s


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure_machine", lambda device: MACHINE)
    monkeypatch.setattr(kernels, "CPU_COLD", 1 << 16)


SMALL = ["--device", "cpu", "--shape", "tiny", "--batch", "1", "--repeats", "1", "--json"]


@pytest.mark.usefixtures("_small")
def test_command_prints_a_table_and_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = tmp_path / "report.json"
    assert main([*SMALL, "--window", "4", "--out", str(kept)]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report == json.loads(kept.read_text())
    assert report["absent_peers"] is not None and "experts" in report["not_measured"]
    (own,) = report["verify"]
    assert own["bytes_ratio"] > 1
    peers = [row for row in report["rows"] if row["peer"]]
    assert {"transformers.torch_recurrent_gated_delta_rule"} <= {row["operation"] for row in peers}
    assert all(row["status"] == "ok" for row in report["rows"])
    for row in report["rows"]:
        assert row["predicted_share"] == pytest.approx(
            row["predicted_s"] / row["seconds"]["median"], rel=1e-4
        )
    assert "snapshot / record" in captured.err


@pytest.mark.usefixtures("_small")
def test_command_ends_with_1_where_an_operation_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Bench.of

    def mutant(*args: Any) -> Bench:
        bench = of(*args)
        return replace(bench, kernels=replaced(bench.kernels, swiglu=wrong(bench.kernels.swiglu)))

    monkeypatch.setattr(kernels.Bench, "of", mutant)
    with pytest.raises(SystemExit) as end:
        main([*SMALL, "--window", "1", "--only", "swiglu,rms_norm"])
    assert end.value.code == 1
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["rows"]
    assert {row["operation"]: row["status"] for row in rows} == {"swiglu": "WRONG", "rms_norm": "ok"}
    assert "WRONG" in captured.err and "1 of 2" in captured.err


def test_an_unwritable_report_is_refused_before_the_run_or_printed_after_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "benchmark", lambda options: pytest.fail("nothing may be measured"))
    assert main([*SMALL, "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot be written"):
        publish("a table", {"benchmark": "none"}, ReportOutput(tmp_path))
    assert capsys.readouterr().out.splitlines() == ["a table", '{"benchmark": "none"}']


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--only", "swigloo"]) == 2
    assert "swigloo" in capsys.readouterr().err
    assert main([*SMALL[:2], "--shape", "huge"]) == 2
    assert main([*SMALL, "--dtype", "float64"]) == 2
    with pytest.raises(ConfigError):
        kernels.benchmark(KernelOptions(device="cuda"))


@pytest.mark.usefixtures("_small")
def test_ctrl_c_shows_what_was_finished(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, calls = kernels.measure, []

    def interrupted(*args: Any) -> dict[str, Any]:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(kernels, "measure", interrupted)
    kept = tmp_path / "report.json"
    assert main([*SMALL, "--window", "1", "--no-peers", "--out", str(kept)]) == 130
    report = json.loads(kept.read_text())
    assert report["interrupted"] and [row["status"] for row in report["rows"]] == ["ok", "ok"]
    out = capsys.readouterr().err
    assert f"INTERRUPTED: 2 of {report['planned']} problems" in out and "delta in" in out
    # Operations that were not reached still have a benchmark.
    assert "experts" in report["not_measured"] and "swiglu" not in report["not_measured"]


@pytest.mark.usefixtures("_small")
def test_peers_can_be_asked_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--window", "2", "--only", "peers"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows and all(row["peer"] for row in rows)
