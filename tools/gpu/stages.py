"""Commands run one after another, each within a time of its own: one that hangs does not stop the rest."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST_S = 10.0
"""A stage is not started with less time left: it would spend it on imports."""
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
    """The file that it writes, if it writes one."""
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
    """Run each stage while the budget lasts, and yield what came of it. What it prints goes to its log.

    Ctrl-C ends the stage that runs, with all that it started, and is the end of the rest. A rehearsal has a
    clock and a `run` of its own.
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
    """Run one stage in a session of its own, so that whatever it started ends with it."""
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
    """End a process and all that it started; a group that is gone is what is wanted.

    The first signal is that of Ctrl-C: a benchmark then shows what it has finished. Who presses it again
    waits no longer for that.
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
