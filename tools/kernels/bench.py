"""Check every operation of the engine against its reference, then time it and compare with its bytes."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.random_model import quiet_transformers, shape_config
from specdec.bench.report import ReportOutput, environment, publish, setup_line, table
from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError
from specdec.kernels.table import OPERATIONS
from specdec.models import families, spec
from specdec.setup.devices import free_memory
from specdec.setup.resolve import resolve
from tools.bench.timing import Machine, measure_machine, time_calls
from tools.kernels import attention_problems, peers, token_problems, window_problems
from tools.kernels.options import KernelOptions
from tools.kernels.problems import Bench, Planned, Sizes

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Relative error of a row's norm: the dtype's rounding, or in float32 that of tensor cores. A wrong row is
off by at least 0.1."""
ONCE = ("pack", "pack_experts", "rope_table")
"""Run when a model is loaded, rather than in a step."""
PLANS = (token_problems.plan, window_problems.plan, attention_problems.plan)
PEERS = "peers"
"""Selects all peers in the list of operations."""
VERIFY = ("delta_net", "mamba", "selective_scan")
"""Operations whose two backings are compared."""
CPU_COLD = 1 << 27
CACHES = 2.5
"""Multiples of the largest cache's size that must be touched before a buffer is reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Default loads."""

    shapes: Sequence[str]
    batches: Sequence[int]
    windows: Sequence[int]
    verify_batches: Sequence[int]
    verify_windows: Sequence[int]
    context: int


DEFAULTS = {
    "cuda": Grid(
        shapes=("qwen3-next-80b-a3b", "nemotron-h-8b"),
        batches=(1, 64),
        windows=(1, 8),
        verify_batches=(1, 16, 64, 256),
        verify_windows=(4, 8, 16),
        context=1024,
    ),
    "cpu": Grid(
        shapes=("tiny",),
        batches=(1, 4),
        windows=(1, 8),
        verify_batches=(1, 4),
        verify_windows=(4, 8),
        context=64,
    ),
}


def run(options: KernelOptions, out: ReportOutput) -> None:
    """Measure, print the table and the report as JSON; exit with 1 if an operation was wrong or failed.

    Ctrl-C is raised again once the finished problems have been published.
    """
    with quiet_transformers() if options.peers else nullcontext():
        report = benchmark(options)
    publish(render(report), report, out)
    if bad := [row for row in report["rows"] if row["status"] in ("WRONG", "FAILED") and not row["peer"]]:
        print(f"specdec: {len(bad)} of {len(report['rows'])} problems were not solved", file=sys.stderr)
    if report["interrupted"]:
        raise KeyboardInterrupt
    if bad:
        sys.exit(1)


def benchmark(options: KernelOptions) -> dict[str, Any]:
    """Check and time each problem; return the report."""
    device, kernels, dtype = _settle(options)
    cold = CPU_COLD
    if device.type == "cuda":
        cold = int(CACHES * torch.cuda.get_device_properties(device).L2_cache_size)
    bench = Bench.of(kernels, device, dtype, cold)
    machine = measure_machine(device)
    planned = list(_plan(bench, options))
    rows: list[dict[str, Any]] = []
    with suppress(KeyboardInterrupt), tqdm(total=len(planned), leave=False, disable=None) as progress:
        for problem in planned:
            progress.set_description(f"{problem.operation} {problem.batch}x{problem.window}")
            rows.append(measure(bench, machine, problem, options.repeats))
            progress.update()
    known = {problem.operation for problem in planned}
    operations = {*OPERATIONS} - {*ONCE}
    return {
        "benchmark": "kernels",
        **environment(),
        "device": str(device),
        "kernels": kernels,
        "dtype": str(dtype).removeprefix("torch."),
        "repeats": options.repeats,
        "copy_bytes_per_s": machine.copy_bytes_per_s,
        "launch_s": machine.launch_s,
        "cold_bytes": cold,
        "planned": len(planned),
        "interrupted": len(rows) < len(planned),
        "absent_peers": peers.absent() if options.peers else None,
        "not_measured": sorted(operations - known) if options.only is None else None,
        "rows": rows,
        "verify": list(_ratios(rows)),
    }


def measure(bench: Bench, machine: Machine, planned: Planned, repeats: int) -> dict[str, Any]:
    """Return one row: the failure, or the figures."""
    row: dict[str, Any] = {
        "operation": planned.operation,
        "shape": planned.shape,
        "detail": planned.detail,
        "batch": planned.batch,
        "window": planned.window,
        "backing": planned.backing,
        "peer": "." in planned.operation,
        "status": "ok",
    }
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()  # release the last problem's memory to the device
    if (free := free_memory(bench.device)) < planned.needs:
        return row | {
            "status": "skipped",
            "why": f"needs {planned.needs / 1e9:.1f} GB, {free / 1e9:.1f} are free",
        }
    try:
        problem = planned.build()
        error = problem.error()
        row["error"] = error
        if not error <= TOLERANCE[bench.dtype]:
            return row | {"status": "WRONG", "why": f"off by {error:.2g} of a row"}
        timing = time_calls(problem.calls, bench.device, repeats, asks=problem.asks)
    except (
        RuntimeError,
        AssertionError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        ImportError,
    ) as fault:
        said = str(fault).strip().splitlines() or [""]
        return row | {"status": "FAILED", "why": f"{type(fault).__name__}: {said[0][:120]}"}
    took_s, predicted_s = timing.seconds.median, machine.predict_s(problem.bytes)
    return row | {
        "seconds": timing.seconds._asdict(),
        "how": timing.how,
        "bytes": problem.bytes,
        "bytes_per_s": problem.bytes / took_s,
        "copy_share": problem.bytes / took_s / machine.copy_bytes_per_s,
        "predicted_s": predicted_s,
        "predicted_share": predicted_s / took_s,
    }


def _settle(options: KernelOptions) -> tuple[torch.device, str, torch.dtype]:
    """Choose device and kernels by the engine's own rules, whatever the model."""
    config = EngineConfig.of(
        EngineConfig(draft="none", memory_bytes=1 << 30, max_model_len=16),
        {"device": options.device, "kernels": options.kernels, "dtype": options.dtype},
    )
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    stored = torch.bfloat16 if on_gpu else torch.float32
    settings = resolve(config, families.network(shape_config("tiny")), stored, 1)
    if settings.dtype not in TOLERANCE:
        raise ConfigError(f"dtype: kernels are measured in {', '.join(map(str, TOLERANCE))}", field="dtype")
    return settings.device, settings.kernels, settings.dtype


def _plan(bench: Bench, options: KernelOptions) -> Iterator[Planned]:
    """Yield all problems: each load once, then the loads at which the backings are compared."""
    grid = DEFAULTS[bench.device.type]
    seen: set[tuple[object, ...]] = set()
    networks = {name: families.network(shape_config(name)) for name in options.shape or grid.shapes}
    for problem in _all(bench, options, grid, networks):
        key = problem.operation, problem.shape, problem.detail, problem.batch, problem.window
        if key not in seen and _is_wanted(problem.operation, options.only):
            seen.add(key)
            yield problem
    if options.only is not None and not seen:
        known = sorted({p.operation for p in _all(bench, options, grid, networks)})
        raise ConfigError(
            f"only: none of {', '.join(options.only)} is measured for these shapes; "
            f"there are {', '.join(known)}",
            field="only",
        )


def _is_wanted(operation: str, only: Sequence[str] | None) -> bool:
    return only is None or operation in only or ("." in operation and PEERS in only)


def _all(
    bench: Bench, options: KernelOptions, grid: Grid, networks: Mapping[str, spec.NetworkSpec]
) -> Iterator[Planned]:
    context = grid.context if options.context is None else options.context
    for name, network in networks.items():
        for batch in options.batch or grid.batches:
            for window in options.window or grid.windows:
                sizes = Sizes(name, network, batch, window, context)
                for plan in PLANS:
                    yield from plan(bench, sizes)
        for batch in options.batch or grid.verify_batches:
            for window in options.window or grid.verify_windows:
                sizes = Sizes(name, network, batch, window, context)
                yield from (
                    p
                    for p in window_problems.plan(bench, sizes)
                    if p.operation in VERIFY and p.backing != "plain"
                )
        # Last, as some compile for a minute.
        if options.peers:
            for batch in options.batch or grid.batches:
                for window in options.window or grid.windows:
                    yield from peers.plan(bench, Sizes(name, network, batch, window, context))


def _ratios(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the ratios of a window's verification time with snapshots to that with records."""
    timed = {
        (row["operation"], row["shape"], row["batch"], row["window"], row["backing"]): row
        for row in rows
        if row["operation"] in VERIFY and "seconds" in row
    }
    for (operation, shape, batch, window, backing), own in timed.items():
        other = timed.get((operation, shape, batch, window, "snapshot"))
        if backing == "record" and other is not None:
            yield {
                "operation": operation,
                "shape": shape,
                "batch": batch,
                "window": window,
                "record_s": own["seconds"]["median"],
                "snapshot_s": other["seconds"]["median"],
                "snapshot_over_record": other["seconds"]["median"] / own["seconds"]["median"],
                "bytes_ratio": other["bytes"] / own["bytes"],
            }


def render(report: Mapping[str, Any]) -> str:
    """Format the report."""
    copy, launch = report["copy_bytes_per_s"], report["launch_s"]
    lines = [
        setup_line(report),
        f"kernels: {report['kernels']}, {report['dtype']}; copied at {copy / 1e9:,.0f} GB/s in this run, "
        f"reads and writes together; a launch takes {launch * 1e6:.2f} µs",
        "model: bytes / copy speed + a launch. Weights and states come from memory, activations may not",
    ]
    if report["interrupted"]:
        lines.append(
            f"INTERRUPTED: {len(report['rows'])} of {report['planned']} problems were reached by then"
        )
    if report["absent_peers"]:
        lines.append(f"absent here, so not measured: {', '.join(report['absent_peers'])}")
    if report["not_measured"]:
        lines.append(f"operations without a benchmark for these shapes: {', '.join(report['not_measured'])}")
    if report["rows"]:
        lines += ["", table([_shown(row) for row in report["rows"]])]
    if report["verify"]:
        lines += ["", "verifying a window, records beside snapshots:", table(_compared(report))]
    return "\n".join(lines)


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    shown = {name: str(row[name]) for name in ("operation", "shape", "detail", "batch", "window")}
    names = ("ms", "p10-p90", "MB", "GB/s", "of copy", "model ms", "of model", "by")
    if "seconds" not in row:
        return shown | dict.fromkeys(names, "") | {"by": f"{row['status']}: {row['why']}"}
    took = row["seconds"]
    return shown | {
        "ms": f"{took['median'] * 1e3:.4f}",
        "p10-p90": f"{took['p10'] * 1e3:.4f}-{took['p90'] * 1e3:.4f}",
        "MB": f"{row['bytes'] / 1e6:.2f}",
        "GB/s": f"{row['bytes_per_s'] / 1e9:.0f}",
        "of copy": f"{row['copy_share']:.0%}",
        "model ms": f"{row['predicted_s'] * 1e3:.4f}",
        "of model": f"{row['predicted_share']:.0%}",
        "by": row["how"],
    }


def _compared(report: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "operation": own["operation"],
            "shape": own["shape"],
            "batch": str(own["batch"]),
            "window": str(own["window"]),
            "record ms": f"{own['record_s'] * 1e3:.4f}",
            "snapshot ms": f"{own['snapshot_s'] * 1e3:.4f}",
            "snapshot / record": f"{own['snapshot_over_record']:.2f}",
            "by bytes": f"{own['bytes_ratio']:.2f}",
        }
        for own in report["verify"]
    ]
