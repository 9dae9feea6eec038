"""All GPU checks and benchmarks, unattended and within a time budget: `make gpu`.

Stages are ordered by importance: kernel correctness at real sizes, the large model's speed, the time of each
kernel, the cost of rollback. Each stage is a process with its own time limit, and its results are packed at
once.
"""

import argparse
import datetime
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.bench.report import ReportOutput, commit, publish, table
from specdec.errors import ConfigError
from tools.gpu.stages import Outcome, Stage, run_stages

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "specdec" / "bench" / "results"
NEEDED = ("torch", "transformers", "pydantic", "safetensors", "tokenizers", "tqdm", "aiohttp")
TESTING = ("pytest", "hypothesis")
BUDGET_S = 560.0
PROCESSES = 12
"""Maximum pytest-xdist processes: a kernel's first launch compiles it, on one core."""
PROCESS_BYTES = 13_000_000_000
"""Device memory per test process."""
PROBE = (
    "import json, torch; p = torch.cuda.get_device_properties(0); "
    "print(json.dumps({'name': p.name, 'bytes': p.total_memory}))"
)
"""Run in a separate process: a CUDA context here would keep memory that a stage needs."""
LARGE = ("qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "0.8b")
"""The largest of these that fits is benchmarked closely. All have an MTP head."""
OTHERS = ("qwen3.5-27b", "nemotron-h-8b", "0.8b")
USABLE = 0.96
"""Usable share of a device's memory."""
GOAL = "3.413"
CHAINS = {GOAL: (3, 1, 4), "2.709": (2, 1, 3), "4.231": (4, 4, 8)}
"""Published acceptance lengths of the large model, with their steps, topk and window; the goal's first."""
LOSSLESS = "mtp-tree-record or mtp-chain-record or oracle-tree-snapshot"
"""The capability cells that differ most; each engine captures its own graphs."""
KERNELS, RANDOM = "tools.kernels", ("tools.bench", "random")
"""The programs that stages run."""
FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    bytes: int
    kind: str = "cuda"

    @property
    def slug(self) -> str:
        """Return the device's name for use in file names."""
        short = re.sub(r"nvidia|geforce|hbm\d\w*|pcie|sxm\d?", "", self.name.lower())
        return re.sub(r"[^a-z0-9]+", "-", short).strip("-") or self.kind


ASSUMED = Device("NVIDIA H200", 150_000_000_000)
"""The device that --dry-run plans for without a GPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, run and summarise; return 1 if a stage did not pass, 2 if nothing can run, 130 after Ctrl-C."""
    try:
        return _main(_parser().parse_args(argv))
    except ConfigError as error:
        print(f"specdec: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(args: argparse.Namespace) -> int:
    folder: Path = args.out.resolve()
    if args.wheels is not None:
        use_wheels(args.wheels, folder / "wheels")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"{', '.join(missing)} cannot be imported by {sys.executable}; name a Python that has all of "
            "them, as in make gpu PYTHON=/path/to/python, or bring wheels: make gpu GPU='--wheels FOLDER'"
        )
    if not 0 < args.budget < math.inf:
        raise ConfigError("--budget: give a number of seconds above 0", field="budget")
    device = Device("cpu", 0, "cpu") if args.device == "cpu" else probe()
    if device is None and not args.dry_run:
        raise ConfigError(
            'torch finds no CUDA device; make gpu GPU="--device cpu" tries this out, and make gpu '
            "GPU=--dry-run shows the plan"
        )
    if device is None:
        device = ASSUMED
        print(f"torch finds no CUDA device: the plan is for an assumed {device.name}")
    prefix = f"{datetime.date.today().isoformat()}-{device.slug}"
    stages = plan(device, folder, prefix)
    print(f"{device.name}: {len(stages)} stages in at most {args.budget:.0f} s, to {folder}", flush=True)
    if args.dry_run:
        print(f"# from {ROOT}, where {folder} exists", *map(_planned, stages), sep="\n")
        return 0
    _make(folder)
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        for outcome in run_stages(stages, budget_s=args.budget, root=ROOT):
            outcomes.append(outcome)
            interrupted = outcome.status == "interrupted"
            print(_line(outcome), flush=True)
            if outcome.status == "passed":
                outcome.stage.log.unlink()
            # Pack after each stage: if the machine is taken away, one file holds the results so far.
            pack(folder, prefix, summary(device, outcomes, planned=len(stages), interrupted=interrupted))
    except KeyboardInterrupt:  # between two stages
        interrupted = True
    report = summary(device, outcomes, planned=len(stages), interrupted=interrupted)
    packed = pack(folder, prefix, report)
    print(f"all of it is in {packed}")
    publish(
        f"\n{render(outcomes, planned=len(stages))}", report, ReportOutput(folder / f"{prefix}-summary.json")
    )
    if interrupted:
        return INTERRUPTED
    return FAILED if any(outcome.status in ("failed", "hung") for outcome in outcomes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, default=RESULTS, help="where reports go (default: bench/results)")
    add(
        "--wheels", metavar="DIR", type=Path, help="wheels of packages that this Python lacks, to be unpacked"
    )
    add(
        "--budget",
        metavar="SECONDS",
        type=float,
        default=BUDGET_S,
        help="for all stages (default: %(default)g)",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small shapes, to try it out")
    add("--dry-run", action="store_true", help="show the commands and their limits")
    return parser


def _make(folder: Path) -> None:
    """Create the report folder; refuse a bad one before measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise ConfigError(f"--out: {folder} is no folder for reports ({reason}); name another", field="out")


def use_wheels(wheels: Path, site: Path) -> None:
    """Unpack wheels, and make them importable for this process and its children."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise ConfigError(
            f"--wheels: there is no .whl in {wheels}; name a folder that has some", field="wheels"
        )
    _make(site)
    for wheel in found:
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"--wheels: {wheel} cannot be unpacked ({error}); bring it again", field="wheels"
            ) from None
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))


def pack(folder: Path, prefix: str, report: dict[str, Any]) -> Path:
    """Pack a run's summary, reports and logs into one file, replacing the previous one atomically."""
    summed = folder / f"{prefix}-summary.json"
    summed.write_text(json.dumps(report) + "\n")
    packed, draft = folder / f"{prefix}.tar.gz", folder / f"{prefix}.tar.gz.part"
    with tarfile.open(draft, "w:gz") as archive:
        for path in sorted([*folder.glob(f"{prefix}-*.json"), *folder.glob(f"{prefix}-*.log")]):
            archive.add(path, path.name)
    draft.replace(packed)
    return packed


def probe() -> Device | None:
    """Return the GPU's name and memory; None if torch finds no GPU."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    return Device(found["name"], found["bytes"])


def plan(device: Device, folder: Path, prefix: str) -> list[Stage]:
    """List the stages, the most important first."""
    made: list[Stage] = []

    def bench(name: str, limit_s: float, *words: str) -> None:
        report = folder / f"{prefix}-{name}.json"
        command = (sys.executable, "-m", *words, "--device", device.kind)
        log = folder / f"{prefix}-{name}.log"
        made.append(Stage(name, (*command, "--out", str(report)), limit_s, log, report))

    def tests(name: str, limit_s: float, *words: str) -> None:
        absent = next((module for module in TESTING if find_spec(module) is None), "")
        absent = absent if (ROOT / "tests").is_dir() else "the tests, which lie beside the package in a clone"
        # pytest-benchmark, if installed, warns under xdist, and warnings are errors.
        plain = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark")
        command = (sys.executable, "-m", "pytest", *plain, *processes(device), *words)
        made.append(Stage(name, command, limit_s, folder / f"{prefix}-{name}.log", absent=absent))

    if device.kind == "cpu":
        _plan_cpu(bench, tests)
    else:
        _plan_cuda(device, bench, tests)
    return made


def processes(device: Device) -> list[str]:
    """Return xdist options for as many processes as cores and device memory allow."""
    room = device.bytes // PROCESS_BYTES if device.kind == "cuda" else PROCESSES
    count = min(len(os.sched_getaffinity(0)), PROCESSES, room)
    return ["-n", str(count)] if count > 1 and find_spec("xdist") else []


Add = Callable[..., None]


def _plan_cpu(bench: Add, tests: Add) -> None:
    tests("kernels-right", 120, "tests/lossless/test_cells.py", "-k", "cases")
    bench("verify", 60, KERNELS, "--shape", "tiny", "--only", "delta_net", "--batch", "4", "--window", "8")
    small = ["--shape", "tiny", "--prompt-tokens", "16", "--new-tokens", "16", "--repeats", "1"]
    bench("tiny-length-2", 60, *RANDOM, *small, *_drafts("2", 2, 1, 3), "--batch", "1", "--profile")


def _plan_cuda(device: Device, bench: Add, tests: Add) -> None:
    # The first two compile kernels that the later ones reuse.
    tests("kernels-right", 200, "-m", "gpu", "tests/gpu/test_gpu_kernels.py", "-k", "real")
    chosen, fp8 = largest(device)
    base = [
        *RANDOM,
        "--shape",
        chosen,
        *(["--quantize", "fp8"] if fp8 else []),
        "--prompt-tokens",
        "128",
    ]

    def length(name: str, limit_s: float, new_tokens: int) -> None:
        once = ["--new-tokens", str(new_tokens), "--batch", "1", "--repeats", "3", "--profile"]
        bench(f"{chosen}-length-{name}", limit_s, *base, *_drafts(name, *CHAINS[name]), *once)

    # Enough tokens to make prefill a small part of the figure.
    length(GOAL, 170, 512)
    bench("kernels-goal", 60, KERNELS, "--shape", chosen, "--batch", "1", "--window", "4", "--no-peers")
    large = "qwen3-next-80b-a3b"
    bench(
        "verify", 60, KERNELS, "--shape", large, "--only", "delta_net", "--batch", "64", "--window", "8",
        "--no-peers",
    )  # fmt: skip
    tests("lossless", 150, "-m", "gpu", "tests/gpu/test_gpu_lossless.py", "-k", LOSSLESS)
    for name in CHAINS:
        if name != GOAL:
            length(name, 100, 128)
    # Here the engine may choose not to draft: the sweep should show that it is never slower.
    drafts = _drafts("2.709", *CHAINS["2.709"], adaptive=True)
    once = ["--new-tokens", "128", "--batch", "1,4,16,64", "--repeats", "1", "--warmup", "1"]
    bench(f"{chosen}-batches", 180, *base, *drafts, *once)
    tests("kernels-odd", 150, "-m", "gpu", "tests/gpu/test_gpu_kernels.py", "-k", "small")
    bench("kernels", 200, KERNELS, "--no-peers")
    bench("peers", 60, KERNELS, "--shape", large, "--only", "peers,recur", "--batch", "64", "--window", "8")
    for name in OTHERS:
        if name != chosen and fits(device, name, fp8=False):
            load = ["--batch", "1,16", "--new-tokens", "64", "--prompt-tokens", "128", "--repeats", "1"]
            bench(name, 60, *RANDOM, "--shape", name, *load)


def _drafts(length: str, steps: int, topk: int, window: int, *, adaptive: bool = False) -> list[str]:
    sizes = ["--num-steps", str(steps), "--topk", str(topk), "--num-draft-tokens", str(window)]
    fixed = [] if adaptive else ["--no-adaptive"]
    return ["--draft", "mtp", *sizes, "--synthetic-acceptance", length, *fixed]


def largest(device: Device) -> tuple[str, bool]:
    """Return the largest shape that fits with 8-bit weights, and whether it uses them."""
    found = next((name for name in LARGE if fits(device, name, fp8=True)), None)
    return (found, True) if found else ("tiny", False)


def fits(device: Device, name: str, *, fp8: bool) -> bool:
    """Return whether a shape's weights fit, with space to draw the last matrix and for some rows."""
    from specdec.bench.random_model import shape_config
    from specdec.models.families import network
    from specdec.models.formats import FORMATS
    from tools.bench.time_model import TimeModel

    model = TimeModel(network(shape_config(name)), quantize=FORMATS["fp8"] if fp8 else None)
    drawn = 2 * max(parameter.count for parameter in model.footprint.target)
    rows = 8 * model.layout.slab_bytes
    return model.weight_bytes(mtp=True) + drawn + rows < USABLE * device.bytes


def summary(
    device: Device, outcomes: Sequence[Outcome], *, planned: int, interrupted: bool
) -> dict[str, Any]:
    return {
        "benchmark": "gpu",
        "commit": commit(),
        "device": device.name,
        "device_bytes": device.bytes,
        "planned": planned,
        "interrupted": interrupted,
        "stages": [
            {
                "name": own.stage.name,
                "status": own.status,
                "seconds": own.took_s,
                "code": own.code,
                "command": list(own.stage.command[1:]),
                # A stopped benchmark still reports its finished part.
                "report": own.stage.report.name if own.stage.report and own.stage.report.exists() else None,
                "tail": "" if own.status == "passed" else own.tail,
            }
            for own in outcomes
        ],
    }


def render(outcomes: Sequence[Outcome], *, planned: int) -> str:
    """Format the stages' results, with the output's tail of failed ones."""
    if not outcomes:
        return "INTERRUPTED before the first stage"
    rows = [
        {
            "stage": own.stage.name,
            "status": own.status,
            "s": f"{own.took_s:.0f}",
            "limit": f"{own.stage.limit_s:.0f}",
        }
        for own in outcomes
    ]
    bad = [f"--- {own.stage.name}: {own.status}\n{own.tail}" for own in outcomes if own.status != "passed"]
    passed = sum(own.status == "passed" for own in outcomes)
    ending = f"{passed} of {planned} stages passed"
    if len(outcomes) < planned:
        ending = f"INTERRUPTED: {ending}, {planned - len(outcomes)} were not reached"
    elif outcomes[-1].status == "interrupted":
        ending = f"INTERRUPTED in the last stage: {ending}"
    return "\n".join([*bad, table(rows), ending])


def _line(outcome: Outcome) -> str:
    return f"{outcome.status:>8} {outcome.took_s:6.1f} s  {outcome.stage.name}"


def _planned(stage: Stage) -> str:
    """Format a stage as a shell comment and its command."""
    without = f"; left out here, for it needs {stage.absent}" if stage.absent else ""
    return f"# {stage.name}, at most {stage.limit_s:.0f} s{without}\n{shlex.join(stage.command)}"
