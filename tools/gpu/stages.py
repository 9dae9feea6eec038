"""Run commands one after another, each with its own time limit, so that a hang does not stop the rest."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST_S = 10.0
"""Minimum time left to start a stage: less would be spent on imports."""
GRACE_S = 10.0
"""Seconds between a signal and the next stronger one."""
TAIL = 15


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    command: tuple[str, ...]
    limit_s: float
    log: Path
    report: Path | None = None
    """The report file, if the stage writes one."""
    absent: str = ""
    """A missing dependency."""


@dataclass(frozen=True, slots=True)
class Outcome:
    stage: Stage
    status: str
    """passed, failed, hung, interrupted, skipped, or `no time`."""
    took_s: float = 0.0
    code: int | None = None
    tail: str = ""


def run_stages(
    stages: Sequence[Stage],
    *,
    budget_s: float,
    root: Path,
    clock: Callable[[], float] = time.monotonic,
    run: "Callable[[Stage, float, Path], Outcome] | None" = None,
) -> Iterator[Outcome]:
    """Run each stage while the budget lasts, and yield its outcome. Its output goes to its log.

    Ctrl-C ends the running stage with its children, and the loop. `clock` and `run` can be replaced in tests.
    """
    end_s = clock() + budget_s
    for stage in stages:
        left_s = end_s - clock()
        if stage.absent:
            yield Outcome(stage, "skipped", tail=f"needs {stage.absent}, which cannot be imported here")
        elif left_s < min(LEAST_S, stage.limit_s):
            yield Outcome(stage, "no time", tail=f"{max(left_s, 0):.0f} s of the budget were left")
        else:
            outcome = (run or _run)(stage, min(stage.limit_s, left_s), root)
            yield outcome
            if outcome.status == "interrupted":
                return


def _run(stage: Stage, limit_s: float, root: Path) -> Outcome:
    """Run one stage in its own session, so that its children end with it."""
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    start_s, code, interrupted = time.monotonic(), None, False
    with stage.log.open("wb") as out:
        process = subprocess.Popen(
            stage.command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=root,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            interrupted = True
        finally:
            _end(process)
    took_s = time.monotonic() - start_s
    tail = "\n".join(stage.log.read_text("utf-8", errors="replace").splitlines()[-TAIL:])
    status = "interrupted" if interrupted else "hung" if code is None else "failed" if code else "passed"
    return Outcome(stage, status, took_s, code, tail)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children; a process group that has ended already is fine.

    SIGINT comes first, on which a benchmark reports its finished part. A second Ctrl-C skips that wait.
    """
    for how in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
    process.wait()
