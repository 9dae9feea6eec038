"""`specdec bench prefix`: traces over caches of several sizes, without a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.prefix.figures import figures
from specdec.bench.prefix.plots import write_plots
from specdec.bench.prefix.policies import Ground, Nothing, PerBlock, Prefix
from specdec.bench.prefix.simulate import Policy, Speeds, simulate
from specdec.bench.prefix.table import render
from specdec.bench.prefix.traces import Trace
from specdec.bench.random_model import shape_config
from specdec.bench.report import Output, environment, publish, until_interrupted
from specdec.bench.store import ResultStore
from specdec.errors import ConfigError
from specdec.models.families import network
from specdec.models.network import memory_layout
from specdec.models.work import ReadingWork
from specdec.state_slots.prefix.tuner import GRID

RESULT = "prefix.json"
NONE, PER_BLOCK, LRU, TUNED, BEST = "none", "vLLM+", "LRU", "tuned", "best"
POLICIES = (NONE, PER_BLOCK, LRU, TUNED, BEST)

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to simulate."""

    traces: Sequence[Trace]
    shape: str
    memory: Sequence[int]
    """Bytes, of requests that live and of prefixes."""
    policies: Sequence[str]
    speeds: Speeds
    seed: int
    arguments: Mapping[str, Any]


class Run:
    """Owns what was measured; each policy on each trace with each size is one measurement."""

    def __init__(self, options: Options, out: Path | None) -> None:
        self.options = options
        spec = network(shape_config(options.shape))
        self.layout = memory_layout(spec, torch.bfloat16, head=spec.mtp)
        least = 2 * self.layout.slab_bytes
        if few := [size for size in options.memory if size < least]:
            raise ConfigError(
                f"--memory: {few[0]} bytes are less than two slabs of {options.shape}; give at least {least}",
                field="memory",
            )
        self.work, self.has_head = ReadingWork.of(spec), bool(spec.mtp)
        # A file may hold something else by the time the same command is repeated.
        content = [trace.digest() for trace in options.traces]
        identity = {"commit": environment()["commit"], **options.arguments, "trace content": content}
        self.store = ResultStore[Record](out, identity, as_json=dict, of=dict)
        self.done: list[Record] = []

    def measure(self) -> None:
        """Run everything that a run before this one has not; Ctrl-C leaves what is done."""
        units = list(self._units())
        with tqdm(total=sum(len(trace.turns) for trace, _, _ in units), leave=False, disable=None) as bar:
            for trace, memory, policy in units:
                bar.set_description(f"{trace.name}, {memory / 1e9:g} GB, {policy}")
                key = trace.name, memory, policy
                record = self.store.get(*key)
                if record is None:
                    record = self._measure(trace, memory, policy, bar.update)
                    self.store.add(*key, measurement=record)
                else:
                    bar.update(len(trace.turns))
                self.done.append(record)

    def report(self, *, interrupted: bool) -> dict[str, Any]:
        """Sum up what was done."""
        return {
            "benchmark": "prefix",
            **environment(),
            "shape": self.options.shape,
            "layout": asdict(self.layout.describe()),
            "seed": self.options.seed,
            "arguments": dict(self.options.arguments),
            "interrupted": interrupted,
            "records": self.done,
        }

    def _units(self) -> Iterator[tuple[Trace, int, str]]:
        for trace in self.options.traces:
            for memory in self.options.memory:
                for policy in self.options.policies:
                    yield trace, memory, policy

    def _measure(self, trace: Trace, memory: int, policy: str, on_turn: Callable[[], object]) -> Record:
        ground = Ground(self.layout, memory, self.work, self.has_head)
        simulated = partial(self._simulate, trace, on_turn=on_turn)
        if policy == BEST:
            found = [simulated(Prefix(ground, alpha)) for alpha in GRID]
            own = max(found, key=lambda record: record["hit_rate"])
        else:
            own = simulated(_make(policy, ground))
        return {"trace": trace.name, "memory_bytes": memory, "policy": policy, **own}

    def _simulate(self, trace: Trace, policy: Policy[Any], *, on_turn: Callable[[], object]) -> Record:
        course = simulate(trace.turns, policy, self.options.speeds, on_turn)
        alphas = policy.alphas if isinstance(policy, Prefix) else []
        return {**figures(trace.turns, course, self.work), "alphas": alphas}


def _make(policy: str, ground: Ground) -> Policy[Any]:
    match policy:
        case "none":
            return Nothing()
        case "vLLM+":
            return PerBlock(ground)
        case "LRU":
            return Prefix(ground, 0.0)
        case "tuned":
            return Prefix(ground, None)
    raise ConfigError(f"--policy: {policy!r} is none of {', '.join(POLICIES)}", field="policy")


def run(options: Options, out: Output) -> None:
    """Simulate and publish the report; with a folder, save the runs and plots there.

    Ctrl-C ends it as it ends anything, once what was done is shown.
    """
    whole = Run(options, out.path)
    with until_interrupted(whole.done) as interruption:
        whole.measure()
    report = whole.report(interrupted=interruption.happened)
    publish(render(report), report, out.within(RESULT))
    if out.path:
        write_plots(report["records"], out.path)
    if interruption.happened:
        raise KeyboardInterrupt
