"""Stages that pass, fail, hang and leave processes behind; and the GPU plan, which runs without a GPU."""

import datetime
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tools.gpu import run as gpu
from tools.gpu.run import Device, largest, main, plan
from tools.gpu.stages import Outcome, Stage, run_stages

H200 = Device("NVIDIA H200", 150_000_000_000)
H100 = Device("NVIDIA H100 80GB HBM3", 84_900_000_000)
HANGING = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def stage(folder: Path, name: str, code: str, limit_s: float = 60, **more: str) -> Stage:
    return Stage(name, (sys.executable, "-c", code), limit_s, folder / f"{name}.log", **more)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stage_that_fails_or_hangs_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.gpu.stages.GRACE_S", 0.5)
    stages = [
        stage(tmp_path, "fails", "print('so it is'); raise SystemExit(3)"),
        stage(tmp_path, "hangs", HANGING, limit_s=1.5),
        stage(tmp_path, "needs", "", absent="something"),
        stage(tmp_path, "passes", "import importlib.util as u, os; print(os.getcwd(), u.find_spec('json'))"),
    ]
    fails, hangs, needs, passes = run_stages(stages, budget_s=120, root=tmp_path)
    assert (fails.status, fails.code) == ("failed", 3) and "so it is" in fails.tail
    assert (hangs.status, hangs.code) == ("hung", None)
    child = int((tmp_path / "hangs.log").read_text().split()[0])
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child), "what a stage started ends with it"
    assert needs.status == "skipped" and "something" in needs.tail
    assert passes.status == "passed" and str(tmp_path) in passes.tail


def test_an_exhausted_budget_ends_the_current_and_later_stages(tmp_path: Path) -> None:
    now = iter([0.0, 1.0, 95.0])
    stages = [stage(tmp_path, name, "print('done')") for name in ("first", "late")]
    first, late = run_stages(stages, budget_s=100, root=tmp_path, clock=lambda: next(now))
    assert first.status == "passed"
    assert late.status == "no time" and "5 s" in late.tail


def test_the_most_important_stages_come_first(tmp_path: Path) -> None:
    names = [own.name for own in plan(H200, tmp_path, "today-h200")]
    chosen, _ = largest(H200)
    assert names[:5] == ["kernels-right", f"{chosen}-length-3.413", "kernels-goal", "verify", "lossless"]
    assert {f"{chosen}-length-{length}" for length in gpu.CHAINS} | {f"{chosen}-batches"} <= set(names)


class Rehearsal:
    """A simulated stage runner: each stage takes the given seconds, and ends or is stopped at its limit."""

    def __init__(self, seconds: dict[str, float], codes: dict[str, int]) -> None:
        self.seconds, self.codes, self.now_s = seconds, codes, 0.0

    def clock(self) -> float:
        return self.now_s

    def run(self, stage: Stage, limit_s: float, root: Path) -> Outcome:
        wanted_s, code = self.seconds.get(stage.name, 20.0), self.codes.get(stage.name, 0)
        took_s = min(wanted_s, limit_s)
        self.now_s += took_s
        stage.log.write_text(f"{stage.name} ran\n")
        if wanted_s > limit_s:
            return Outcome(stage, "hung", took_s, None, "at its limit")
        return Outcome(stage, "failed" if code else "passed", took_s, code, "")


def test_a_rehearsal_records_the_outcome_of_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is over its limit, one crashes, the budget ends before the last: one file records all of it."""
    monkeypatch.setattr(gpu, "probe", lambda: H200)
    chosen, _ = largest(H200)
    seconds = {"kernels-right": 1000.0, "lossless": 140.0, f"{chosen}-length-2.709": 300.0}
    rehearsal = Rehearsal(seconds, {"kernels-goal": -11})
    packed_after: list[int] = []
    packs = gpu.pack

    def counted(folder: Path, prefix: str, report: dict[str, Any]) -> Path:
        packed_after.append(len(report["stages"]))
        return packs(folder, prefix, report)

    monkeypatch.setattr(gpu, "pack", counted)
    rehearsed = partial(run_stages, clock=rehearsal.clock, run=rehearsal.run)
    monkeypatch.setattr(gpu, "run_stages", rehearsed)
    assert main(["--out", str(tmp_path), "--budget", "500"]) == 1
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        names = archive.getnames()
        (name,) = (name for name in names if name.endswith("-summary.json"))
        file = archive.extractfile(name)
        assert file
        summary = json.loads(file.read())
    found = {own["name"]: own["status"] for own in summary["stages"]}
    first = ["kernels-right", f"{chosen}-length-3.413", "kernels-goal", "verify", "lossless"]
    assert [found[name] for name in first] == ["hung", "passed", "failed", "passed", "passed"]
    assert found[f"{chosen}-length-2.709"] == "hung", "what is left of the budget is its limit"
    late = [name for name in found if name not in (*first, f"{chosen}-length-2.709")]
    assert len(late) == summary["planned"] - 6 and {found[name] for name in late} == {"no time"}
    assert packed_after == [*range(1, summary["planned"] + 1), summary["planned"]]
    logs = {name.split("h200-")[1] for name in names if name.endswith(".log")}
    assert logs == {"kernels-right.log", "kernels-goal.log", f"{chosen}-length-2.709.log"}


def test_wheels_are_imported_by_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing packages are supplied as wheels; a folder without any is reported in one line."""
    wheels = tmp_path / "brought"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "brought_here-1-py3-none-any.whl", "w") as archive:
        archive.writestr("brought_here/__init__.py", "SAYS = 'here I am'\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "brought_here"))
    code = "import brought_here; print(brought_here.SAYS); raise SystemExit(3)"
    monkeypatch.setattr(gpu, "plan", lambda *_: [stage(tmp_path, "asks", code)])
    assert main(["--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    (tmp_path / "out").mkdir(exist_ok=True)
    words = ["--device", "cpu", "--out", str(tmp_path / "out"), "--wheels"]
    assert main([*words, str(tmp_path / "out")]) == 2
    assert main([*words, str(wheels)]) == 1
    assert "here I am" in (tmp_path / "asks.log").read_text()


def test_tests_are_shared_out_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert gpu.processes(H200) == ["-n", "11"]
    assert gpu.processes(Device("small", 24_000_000_000)) == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert gpu.processes(H200) == []


def test_shapes_are_those_that_fit() -> None:
    assert largest(H200) == ("qwen3-next-80b-a3b", True)
    assert largest(H100) == ("qwen3.5-35b-a3b", True)
    assert largest(Device("small", 24_000_000_000)) == ("0.8b", True)
    assert largest(Device("none", 1_000_000)) == ("tiny", False)


@pytest.mark.parametrize("device", [H200, H100, Device("cpu", 0, "cpu")], ids=lambda device: device.slug)
def test_every_planned_command_is_one_that_is_understood(device: Device, tmp_path: Path) -> None:
    """Parse each command with the command line's parser, without running it."""
    from tools.bench.__main__ import parser as bench_parser
    from tools.kernels.__main__ import parser

    parsers = {"tools.bench": bench_parser(), "tools.kernels": parser()}
    for own in plan(device, tmp_path, "today"):
        words = list(own.command[1:])
        if words[1] in parsers:
            args = parsers[words[1]].parse_args(words[2:])
            assert args.device == device.kind and str(args.out) == str(own.report)
        else:
            assert words[:2] == ["-m", "pytest"]
            assert all((gpu.ROOT / word).exists() for word in words if word.startswith("tests/"))
    assert {own.log.parent for own in plan(device, tmp_path, "today")} == {tmp_path}


def test_names_of_devices_fit_a_file() -> None:
    assert [H200.slug, H100.slug] == ["h200", "h100-80gb"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dry_run_shows_commands_that_run_as_they_stand(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "probe", lambda: None)
    folder = tmp_path / "a folder"
    assert main(["--device", device, "--dry-run", "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert ("assumed NVIDIA H200" in out) == (device == "cuda")
    shown = [shlex.split(line) for line in out.splitlines() if line.startswith(sys.executable)]
    known = Device("cpu", 0, "cpu") if device == "cpu" else gpu.ASSUMED
    prefix = f"{datetime.date.today().isoformat()}-{known.slug}"
    assert shown == [list(own.command) for own in plan(known, folder, prefix)]
    assert not folder.exists()


def test_stages_that_cannot_run_are_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    for words in (["--out", str(taken)], ["--budget", "0"], ["--budget", "nan"], ["--budget=-3"]):
        assert main(["--device", "cpu", *words]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert line.startswith(f"specdec: {words[0].partition('=')[0]}: ")


def test_missing_packages_are_named_before_they_are_imported() -> None:
    """With -S Python finds none of the installed packages."""
    command = [sys.executable, "-S", "-m", "tools.gpu"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=gpu.ROOT, env=environment, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("specdec: torch, transformers") and "PYTHON=" in line


def test_ctrl_c_ends_the_stage_and_summarises_finished_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.gpu.stages.GRACE_S", 0.5)
    # The stage sends its parent Ctrl-C once its own child runs.
    pressing = HANGING.replace("time.sleep(600)\n", "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)\n")
    stages = [
        stage(tmp_path, "first", ""),
        stage(tmp_path, "pressing", pressing),
        stage(tmp_path, "last", ""),
    ]
    monkeypatch.setattr(gpu, "plan", lambda *_: stages)
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 130
    captured = capsys.readouterr()
    summary = json.loads(next(tmp_path.glob("*-summary.json")).read_text())
    assert [own["status"] for own in summary["stages"]] == ["passed", "interrupted"]
    assert summary["interrupted"] and summary["planned"] == 3
    assert "INTERRUPTED: 1 of 3 stages passed, 1 were not reached" in captured.out
    child = int((tmp_path / "pressing.log").read_text().split()[0])
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_no_gpu_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "probe", lambda: None)
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "no CUDA device" in said and 'make gpu GPU="--device cpu"' in said
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    assert main([]) == 2
    assert "no_such_package" in capsys.readouterr().err


def test_it_runs_from_beginning_to_end_on_a_cpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gpu.plan

    def shorter(device: Device, folder: Path, prefix: str) -> list[Stage]:
        stages = [own for own in whole(device, folder, prefix) if own.name == "verify"]
        return [*stages, stage(folder, "fails", "raise SystemExit('on purpose')")]

    monkeypatch.setattr(gpu, "plan", shorter)
    assert main(["--device", "cpu", "--out", str(tmp_path), "--budget", "200"]) == 1
    out = capsys.readouterr().out
    summary = json.loads(next(tmp_path.glob("*-summary.json")).read_text())
    found = {own["name"]: own["status"] for own in summary["stages"]}
    assert found == {"verify": "passed", "fails": "failed"}
    assert "1 of 2 stages passed" in out and "on purpose" in out
    (report,) = (tmp_path / own["report"] for own in summary["stages"] if own["report"])
    (compared,) = json.loads(report.read_text())["verify"]
    assert (compared["batch"], compared["window"]) == (4, 8)
    kept = json.loads(next(tmp_path.glob("*-summary.json")).read_text())
    assert kept == summary
    # Passed stages keep their report, failed ones their log.
    assert [path.name for path in tmp_path.glob("*.log")] == ["fails.log"]
