"""All that a GPU is asked, unattended and within a budget of time: `python -m specdec.bench.gpu`.

Most important first: whether the kernels are right, what taking back costs, how fast the large model is. Each
stage is a process with a limit of its own.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.bench.report import commit, json_line, table
from specdec.bench.stages import Outcome, Stage, run_stages

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
NEEDED = ("torch", "transformers", "pydantic", "safetensors", "tokenizers", "tqdm", "aiohttp")
TESTING = ("pytest", "hypothesis")
PROBE = (
    "import json, torch; p = torch.cuda.get_device_properties(0); "
    "print(json.dumps({'name': p.name, 'bytes': p.total_memory}))"
)
"""Asked in a process of its own: one that holds the device would keep memory that a stage needs."""
LARGE = ("qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "0.8b")
"""The largest of these that fits is the one that is looked at closely. All have a head that drafts."""
OTHERS = ("qwen3.5-27b", "nemotron-h-8b", "0.8b")
USABLE = 0.96
"""Of a device's memory, before anything runs."""
CHAINS = {"3.413": (3, 1, 4), "2.709": (2, 1, 3), "4.231": (4, 4, 8)}
"""Published acceptance lengths of the large model, with steps, topk and window that they belong to; the one
with a goal first."""
LOSSLESS = "mtp-tree-record or mtp-chain-record or oracle-tree-snapshot"
"""Of the capability table's cells those that differ most: each engine captures its graphs anew."""
FAILED, USER_ERROR = 1, 2


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    bytes: int
    kind: str = "cuda"

    @property
    def slug(self) -> str:
        """Name the device in a file's name."""
        short = re.sub(r"nvidia|geforce|hbm\d\w*|pcie|sxm\d?", "", self.name.lower())
        return re.sub(r"[^a-z0-9]+", "-", short).strip("-") or self.kind


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, run, sum up; return 1 if a stage did not pass, 2 if nothing can run."""
    args = _parser().parse_args(argv)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"specdec: {', '.join(missing)} cannot be imported by {sys.executable}", file=sys.stderr)
        return USER_ERROR
    device = Device("cpu", 0, "cpu") if args.device == "cpu" else probe()
    if device is None:
        print(
            "specdec: torch finds no CUDA device; --device cpu tries this out",
            file=sys.stderr,
        )
        return USER_ERROR
    folder: Path = args.out
    prefix = f"{datetime.date.today().isoformat()}-{device.slug}"
    stages = plan(device, folder, prefix)
    print(f"{device.name}: {len(stages)} stages in at most {args.budget:.0f} s, to {folder}", flush=True)
    if args.dry_run:
        print(table([_planned(stage) for stage in stages]))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for outcome in run_stages(stages, budget_s=args.budget, root=ROOT):
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
        if outcome.status == "passed":
            outcome.stage.log.unlink()
    report = summary(device, outcomes)
    (folder / f"{prefix}-summary.json").write_text(f"{json_line(report)}\n", "utf-8")
    print(f"\n{render(outcomes)}\n{json_line(report)}")
    return FAILED if any(outcome.status in ("failed", "hung") for outcome in outcomes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.gpu", description=__doc__)
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, default=RESULTS, help="where reports go (default: bench/results)")
    add("--budget", metavar="SECONDS", type=float, default=470.0, help="for all stages (default: 470)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small shapes, to try it out")
    add("--dry-run", action="store_true", help="say what would run, and with which limits")
    return parser


def probe() -> Device | None:
    """Ask for the GPU's name and memory; None where torch finds none."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    if done.returncode:
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    return Device(found["name"], found["bytes"])


def plan(device: Device, folder: Path, prefix: str) -> list[Stage]:
    """List the stages, the most important first."""
    made: list[Stage] = []

    def bench(name: str, limit_s: float, *words: str) -> None:
        report = folder / f"{prefix}-{name}.json"
        command = (sys.executable, "-m", "specdec.cli", "bench", *words, "--device", device.kind)
        log = folder / f"{prefix}-{name}.log"
        made.append(Stage(name, (*command, "--out", str(report)), limit_s, log, report))

    def tests(name: str, limit_s: float, *words: str) -> None:
        absent = next((module for module in TESTING if find_spec(module) is None), "")
        absent = absent if (ROOT / "tests").is_dir() else "the tests, which lie beside the package in a clone"
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words)
        made.append(Stage(name, command, limit_s, folder / f"{prefix}-{name}.log", absent=absent))

    if device.kind == "cpu":
        _plan_cpu(bench, tests)
    else:
        _plan_cuda(device, bench, tests)
    return made


Add = Callable[..., None]


def _plan_cpu(bench: Add, tests: Add) -> None:
    tests("kernels-right", 120, "tests/test_cells.py", "-k", "cases")
    bench("verify", 60, "kernels", "--shape", "tiny", "--only", "delta_net", "--batch", "4", "--window", "8")
    small = ["--random", "--shape", "tiny", "--prompt-tokens", "16", "--new-tokens", "16", "--repeats", "1"]
    bench("tiny-length-2", 60, "throughput", *small, *_drafts("2", 2, 1, 3), "--batch", "1", "--profile")


def _plan_cuda(device: Device, bench: Add, tests: Add) -> None:
    tests("kernels-right", 120, "-m", "gpu", "tests/gpu/test_gpu_kernels.py", "-k", "real")
    large = "qwen3-next-80b-a3b"
    bench(
        "verify", 60, "kernels", "--shape", large, "--only", "delta_net", "--batch", "64", "--window", "8",
        "--no-peers",
    )  # fmt: skip
    chosen, fp8 = largest(device)
    form = ["--fp8"] if fp8 else []
    base = [
        "throughput",
        "--random",
        "--shape",
        chosen,
        *form,
        *["--new-tokens", "128", "--prompt-tokens", "128"],
    ]
    for i, (length, (steps, topk, window)) in enumerate(CHAINS.items()):
        drafts = _drafts(length, steps, topk, window)
        # The first compiles what the others find compiled.
        limit_s, once = 80 if i else 160, ("--batch", "1", "--repeats", "3", "--profile")
        bench(f"{chosen}-length-{length}", limit_s, *base, *drafts, *once)
    drafts = _drafts("3.413", *CHAINS["3.413"])
    sweep = "1,2,4,8,16,32,64,128,256"
    bench(f"{chosen}-batches", 100, *base, *drafts, "--batch", sweep, "--repeats", "1", "--warmup", "1")
    tests("lossless", 150, "-m", "gpu", "tests/gpu/test_gpu_lossless.py", "-k", LOSSLESS)
    tests("kernels-odd", 150, "-m", "gpu", "tests/gpu/test_gpu_kernels.py", "-k", "small")
    bench("kernels", 200, "kernels", "--no-peers")
    bench("peers", 60, "kernels", "--shape", large, "--only", "peers,recur", "--batch", "64", "--window", "8")
    for name in OTHERS:
        if name != chosen and fits(device, name, fp8=False):
            load = ["--batch", "1,16", "--new-tokens", "64", "--prompt-tokens", "128", "--repeats", "1"]
            bench(name, 60, "throughput", "--random", "--shape", name, *load)


def _drafts(length: str, steps: int, topk: int, window: int) -> list[str]:
    sizes = ["--num-steps", str(steps), "--topk", str(topk), "--num-draft-tokens", str(window)]
    return ["--draft", "mtp", *sizes, "--synthetic-acceptance", length, "--no-adaptive"]


def largest(device: Device) -> tuple[str, bool]:
    """Choose the largest shape that fits with weights of eight bits; say whether it has them."""
    found = next((name for name in LARGE if fits(device, name, fp8=True)), None)
    return (found, True) if found else ("tiny", False)


def fits(device: Device, name: str, *, fp8: bool) -> bool:
    """Say whether a shape's weights, and the last matrix while it is drawn, leave room for some rows."""
    from specdec.bench.random_model import shape_config
    from specdec.bench.time_model import TimeModel
    from specdec.models.families import network

    model = TimeModel(network(shape_config(name)))
    drawn = 2 * max(parameter.count for parameter in model.footprint.target)
    rows = 8 * model.layout.slab_bytes
    return model.weight_bytes(fp8=fp8, mtp=True) + drawn + rows < USABLE * device.bytes


def summary(device: Device, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "benchmark": "gpu",
        "commit": commit(),
        "device": device.name,
        "device_bytes": device.bytes,
        "stages": [
            {
                "name": own.stage.name,
                "status": own.status,
                "seconds": own.took_s,
                "code": own.code,
                "command": list(own.stage.command[1:]),
                "report": own.stage.report.name if own.stage.report and own.status == "passed" else None,
                "tail": "" if own.status == "passed" else own.tail,
            }
            for own in outcomes
        ],
    }


def render(outcomes: Sequence[Outcome]) -> str:
    """Say what passed, and show the end of what did not."""
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
    return "\n".join([*bad, table(rows), f"{passed} of {len(outcomes)} stages passed"])


def _line(outcome: Outcome) -> str:
    return f"{outcome.status:>8} {outcome.took_s:6.1f} s  {outcome.stage.name}"


def _planned(stage: Stage) -> dict[str, str]:
    words = " ".join(stage.command[1:])
    shown = f"(needs {stage.absent}) {words}" if stage.absent else words
    return {"stage": stage.name, "limit s": f"{stage.limit_s:.0f}", "command": shown}


if __name__ == "__main__":
    sys.exit(main())
