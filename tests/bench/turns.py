"""Time two checkouts in turn: `python -m tests.bench.turns OTHER --pairs 7 --settings none:1,mtp:8`.

Each pair is a process of either checkout, both on one processor. They generate alternately, so that other
load slows both. Processes differ by some percent from start to start: the ratio is the median over the pairs.
A setting is a drafter and the number of concurrent prompts.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHAIN = {"adaptive": False, "num_steps": 4, "topk": 1, "num_draft_tokens": 5}
TREE = {"adaptive": False, "num_steps": 4, "topk": 4, "num_draft_tokens": 16}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"draft": "none"},
    "mtp": {"draft": "mtp", **CHAIN},
    "tree": {"draft": "mtp", **TREE},
    "suffix": {"draft": "suffix", **CHAIN},
    "auto": {"draft": "auto"},
}
PROMPT, NEW = 32, 128


def work(setting: str) -> None:
    """Generate for each line received, and print the time."""
    from specdec import SamplingParams, SpecEngine

    draft, batch = setting.split(":")
    prompts = [[5 + (7 * i + 13 * row) % 900 for i in range(PROMPT)] for row in range(int(batch))]
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    with SpecEngine("tiny", prefix_cache=False, max_model_len=512, **DRAFTS[draft]) as engine:
        for _ in itertools.chain([""], sys.stdin):  # the first warms up
            start_s = time.perf_counter()
            engine.generate(prompts, params)
            print(time.perf_counter() - start_s, flush=True)
            engine.flush()


@contextmanager
def worker(folder: Path, setting: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, __file__, "--work", setting]
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as own:
        os.sched_setaffinity(own.pid, {max(os.sched_getaffinity(0))})
        seconds(own)
        yield own
        assert own.stdin
        own.stdin.close()


def seconds(own: "subprocess.Popen[str]") -> float:
    assert own.stdout
    return float(own.stdout.readline())


def compare(other: Path, setting: str, runs: int) -> float:
    """Return the speedup of this checkout over the other (above 1: faster), the median over runs."""
    here = Path(__file__).parents[2]
    with worker(other, setting) as before, worker(here, setting) as after:
        ratios = []
        for run in range(runs):
            took = {}
            for own in (before, after) if run % 2 else (after, before):
                assert own.stdin
                own.stdin.write("\n")
                own.stdin.flush()
                took[own] = seconds(own)
            ratios.append(took[before] / took[after])
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--settings", default="none:1,none:8,mtp:1,mtp:8,tree:1,suffix:1,auto:1")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work)
    for setting in options.settings.split(","):
        found = [compare(options.other.resolve(), setting, options.runs) for _ in range(options.pairs)]
        print(
            f"{setting:10} {statistics.median(found):.3f} x the other's speed:", *(f"{x:.3f}" for x in found)
        )
    return None


if __name__ == "__main__":
    main()
