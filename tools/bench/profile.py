"""Profile decode steps by kernel, and measure how long the device waits for the host."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from specdec.bench.report import table
from specdec.bench.runner import EngineRunner
from specdec.kernels.native.call import listening

STEPS = 8
TOP = 25


def profile_steps(runner: EngineRunner, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Prefill the prompts, then profile some steps in which every row decodes."""
    core, on_gpu = runner.model.core, runner.model.settings.device.type == "cuda"
    requests = runner.submit(prompts, room(runner.model.settings.bounds.num_steps))
    while not all(request.output_length for request in requests):
        core.step()
    for _ in range(STEPS):
        core.step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found, _Named():
        steps = 0
        while steps < STEPS and all(request.finish_reason is None for request in requests):
            core.step()
            steps += 1
        if on_gpu:
            torch.cuda.synchronize()
    core.run_until_idle()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in found.events() or [] if event.device_type == kind]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    by_name: dict[str, tuple[float, int]] = {}
    for event in events:
        took_us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        before_us, count = by_name.get(event.name, (0.0, 0))
        by_name[event.name] = before_us + took_us, count + 1
    total_us = sum(us for us, _ in by_name.values())
    ordered = sorted(by_name.items(), key=lambda item: -item[1][0])
    return {
        "steps": steps,
        "rows": len(prompts),
        "kernels": [
            {"name": name, "us_per_step": us / steps, "calls_per_step": calls / steps, "share": us / total_us}
            for name, (us, calls) in ordered[:TOP]
        ],
        "kernel_us_per_step": total_us / steps,
        "launches_per_step": len(events) / steps,
        "idle_share": idle_share(spans) if on_gpu else None,
    }


class _Named:
    """Record native kernels in the profiler by name; tapes are not replayed meanwhile."""

    def __enter__(self) -> None:
        listening.recorder = self

    def __exit__(self, *_: object) -> None:
        listening.recorder = None

    def call(self, name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        with record_function(name):
            function(*arguments)


def room(num_steps: int) -> int:
    """Return the most tokens that a row may gain before and during profiling."""
    return (2 * STEPS + 1) * (num_steps + 1)


def idle_share(spans: Iterable[tuple[float, float]]) -> float:
    """Return the share of the time between the first start and the last end in which nothing ran."""
    ordered = sorted(spans)
    if not ordered:
        return 1.0
    busy, until = 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - ordered[0][0]
    return 1 - busy / whole if whole > 0 else 0.0


def render(report: Mapping[str, Any]) -> str:
    """Format a profile."""
    rows = [
        {
            "kernel": own["name"][:90],
            "µs/step": f"{own['us_per_step']:.1f}",
            "calls/step": f"{own['calls_per_step']:.1f}",
            "share": f"{own['share']:.1%}",
        }
        for own in report["kernels"]
    ]
    idle = report["idle_share"]
    waits = (
        "; profiled steps run without tapes, so they take longer than timed ones"
        if idle is None
        else f"; the device waits for the host during {idle:.0%} of a step"
    )
    return (
        f"{report['steps']} steps of {report['rows']} rows: {report['kernel_us_per_step']:,.0f} µs in "
        f"{report['launches_per_step']:,.0f} kernels a step{waits}\n{table(rows)}"
    )
