"""Decode speed of named shapes with weights drawn on the device: with and without drafts, by batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.agreement import rounding
from specdec.bench.peers import Sample
from specdec.bench.report import (
    ReportOutput,
    environment,
    publish,
    setup_line,
    summarise,
    table,
    until_interrupted,
)
from specdec.bench.runner import ENGINE, EngineRunner
from specdec.bench.throughput import RANDOM_DRAFTS, ThroughputCase, legend, longest
from specdec.config.engine import EngineConfig
from specdec.errors import EngineError
from specdec.setup.build import build_random
from specdec.setup.drafters import has_weights
from specdec.setup.resolve import DEFAULT_STEPS
from tools.bench import profile as profiling
from tools.bench.options import RandomOptions
from tools.bench.random_fit import MemoryFit, fit, fitting
from tools.bench.time_model import StepWork
from tools.bench.timing import Machine, measure_machine


@dataclass(frozen=True, slots=True)
class DraftCounters:
    """Draft counters of a runner's requests."""

    steps: int
    drafted: int

    @classmethod
    def of(cls, runner: EngineRunner) -> "DraftCounters":
        counts = runner.model.loop.counts
        return cls(counts.steps, counts.drafted)

    def since(self, before: "DraftCounters") -> float:
        """Return the mean window between two counts, including the root."""
        return 1 + (self.drafted - before.drafted) / max(self.steps - before.steps, 1)


def run(options: RandomOptions, config: EngineConfig, out: ReportOutput) -> None:
    """Measure and publish the report.

    Ctrl-C is raised again once the finished cases have been published.
    """
    report = benchmark(options, config)
    publish(render(report), report, out)
    if report["interrupted"]:
        raise KeyboardInterrupt


def benchmark(options: RandomOptions, config: EngineConfig) -> dict[str, Any]:
    """Draw the weights, run every batch with and without drafts, and return the report."""
    watched = profiling.room(config.num_steps or DEFAULT_STEPS) if options.profile else 0
    needed = longest(options, config, watched=watched)
    given = config.model_dump(exclude_unset=True)
    found = fit(options.shape, EngineConfig.of(EngineConfig(max_model_len=needed), given))
    tokens = found.settings.max_model_len
    batches = fitting(found, options.batch, tokens)
    room = EngineConfig(
        max_running=max(batches), max_model_len=needed, memory_bytes=found.memory_for(max(batches), tokens)
    )
    machine = measure_machine(found.settings.device)  # while there is still memory for it
    model = build_random(
        found.model.network,
        EngineConfig.of(room, {name: value for name, value in given.items() if name != "memory_bytes"}),
        stored=found.stored,
        stored_bytes=found.stored_bytes,
        seed=options.seed or 0,
    )
    settings = model.settings
    engine = EngineRunner(model)
    runners = [engine, engine.plain()] if settings.drafters else [engine]
    cases = [ThroughputCase(batch, prompt) for batch in batches for prompt in options.prompt_tokens]
    prompts = cases[0].prompts(found.model.network.vocab, options.seed or 0)
    measured: list[dict[str, Any]] = []
    with until_interrupted(measured):
        for case in _measure(options, found, machine, runners, cases):
            measured.append(case)
    interrupted = len(measured) < len(cases)
    profiled = options.profile and not interrupted
    return {
        "benchmark": "random throughput",
        **environment(),
        "shape": options.shape,
        "family": found.model.network.family,
        "parameters": found.model.footprint.parameters,
        "weight_bytes": found.weight_bytes,
        "arena_bytes": settings.memory_bytes,
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "rounding": rounding(settings),
        "quantize": settings.quantize,
        "settings": given,
        "seed": options.seed or 0,
        "new_tokens": options.new_tokens,
        "warmup": options.warmup,
        "repeats": options.repeats,
        "copy_bytes_per_s": machine.copy_bytes_per_s,
        "contestants": {runner.name: runner.describe() for runner in runners},
        "left_out": [batch for batch in options.batch if batch not in batches],
        "interrupted": interrupted,
        "cases": measured,
        "memory": [_memory(found, batch, tokens) for batch in batches],
        "profiles": {r.name: profiling.profile_steps(r, prompts) for r in runners} if profiled else {},
    }


def _measure(
    options: RandomOptions,
    found: MemoryFit,
    machine: Machine,
    runners: Sequence[EngineRunner],
    cases: Sequence[ThroughputCase],
) -> Iterator[dict[str, Any]]:
    """Run each case on all runners in turn, and compare their tokens if the dtype is exact."""
    with tqdm(total=len(cases) * (options.warmup + options.repeats), leave=False, disable=None) as progress:
        for case in cases:
            progress.set_description(f"batch {case.batch}, prompt {case.prompt_tokens}")
            prompts = case.prompts(found.model.network.vocab, options.seed or 0)
            samples: dict[str, list[Sample]] = {runner.name: [] for runner in runners}
            before: dict[str, DraftCounters] = {}
            for repeat in range(-options.warmup, options.repeats):
                for runner in runners:
                    if repeat == 0:
                        before[runner.name] = DraftCounters.of(runner)
                    sample = runner.run(prompts, options.new_tokens)
                    if repeat >= 0:
                        samples[runner.name].append(sample)
                progress.update()
            widths = {runner.name: DraftCounters.of(runner).since(before[runner.name]) for runner in runners}
            agreement = check(found, samples)
            figures = {
                runner.name: _figures(case, found, machine, runner, samples, widths[runner.name])
                for runner in runners
            }
            yield {
                "batch": case.batch,
                "prompt_tokens": case.prompt_tokens,
                "agreement": agreement,
                "figures": figures,
            }


def check(found: MemoryFit, samples: Mapping[str, Sequence[Sample]]) -> dict[str, int] | None:
    """Compare the tokens with and without drafts; raise on a difference if the dtype is exact.

    Skipped with synthetic acceptance, whose text differs by design.
    """
    if found.settings.synthetic or len(samples) < 2:
        return None
    first, second = (own[0].token_ids or () for own in samples.values())
    equal = sum(a == b for a, b in zip(first, second, strict=True))
    if equal < len(first) and not rounding(found.settings):
        raise EngineError(
            f"{len(first) - equal} of {len(first)} rows say something else with drafts than without; no "
            "figure is shown for a result that is wrong"
        )
    return {"rows": len(first), "equal": equal}


def _figures(
    case: ThroughputCase,
    found: MemoryFit,
    machine: Machine,
    runner: EngineRunner,
    samples: Mapping[str, Sequence[Sample]],
    width: float,
) -> dict[str, Any]:
    own, settings = samples[runner.name], runner.model.settings
    step_s = summarise([s for sample in own for s in sample.step_s])
    per_step = summarise([sample.tokens_per_step for sample in own])
    plain = list(samples.values())[-1]
    ratio = summarise([b.token_s / a.token_s for a, b in zip(own, plain, strict=True)])
    work = StepWork(
        rows=case.batch,
        window=max(1, round(width)),
        context=round(case.prompt_tokens + len(own[0].step_s) * per_step.median / 2),
        accepted=per_step.median,
        draft_steps=min(settings.bounds.num_steps, round(width) - 1) if has_weights(settings.drafters) else 0,
        topk=settings.bounds.topk,
        slots=settings.config.slots,
    )
    floor_s = sum(found.model.step(work).values()) / machine.copy_bytes_per_s
    return {
        "prefill_s": summarise([sample.prefill_s for sample in own])._asdict(),
        "step_s": step_s._asdict(),
        "tokens_per_step": per_step._asdict(),
        "window": width,
        "decode_tokens_per_s": case.batch / summarise([sample.token_s for sample in own]).median,
        "over_none": ratio._asdict(),
        "floor_s": floor_s,
        "ceiling_share": floor_s / step_s.median,
    }


def _memory(found: MemoryFit, batch: int, tokens: int) -> dict[str, Any]:
    """Return the bytes per row for either kind of draft slot, and the rows that fit the arena."""
    rows = {slots: found.rows(tokens, slots) for slots in ("record", "snapshot")}
    return {
        "batch": batch,
        "tokens": tokens,
        "row_bytes": {slots: found.row_bytes(tokens, slots) for slots in rows},
        "state_bytes": found.settings.layout.state_bytes,
        "rows": rows,
    }


def render(report: Mapping[str, Any]) -> str:
    """Format the report."""
    lines = [
        f"random weights of shape {report['shape']}: {report['parameters'] / 1e6:,.1f} M parameters, "
        f"{report['dtype']}{f', matrices in {form}' if (form := report['quantize']) else ''}, "
        f"{report['weight_bytes'] / 1e9:.2f} GB",
        setup_line(report),
        f"memory copied at {report['copy_bytes_per_s'] / 1e9:,.0f} GB/s in this run (reads and writes)",
        "NO TEXT: random weights write none, and no peer has them. Drafts are compared with draft none.",
    ]
    rates = report["contestants"][ENGINE]["synthetic_acceptance"]
    if rates is not None:
        shown = ", ".join(f"{rate:.2f}" for rate in rates)
        lines.append(f"SYNTHETIC ACCEPTANCE: drafts are accepted at rates {shown} by depth")
    elif report["contestants"][ENGINE]["drafters"]:
        lines.append(RANDOM_DRAFTS)
    if checked := [case["agreement"] for case in report["cases"] if case["agreement"]]:
        rows, equal = (sum(own[key] for own in checked) for key in ("rows", "equal"))
        excuse = f"; informational with {report['rounding']}" if report["rounding"] else ""
        lines.append(f"checked: {equal} of {rows} rows say the same with drafts and without{excuse}")
    if report["interrupted"]:
        lines.append(f"INTERRUPTED after {len(report['cases'])} cases")
    if report["left_out"]:
        lines.append(f"do not fit: batches {', '.join(map(str, report['left_out']))}")
    lines += ["", table(list(_rows(report))), "", table(list(_memory_rows(report)))]
    lines += ["", *legend("x none: speed over draft none's, above 1 is faster", synthetic=rates is not None)]
    lines += [f"\n{name}: {profiling.render(own)}" for name, own in report["profiles"].items()]
    return "\n".join(lines)


def _rows(report: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for case in report["cases"]:
        for name, own in case["figures"].items():
            step = own["step_s"]
            yield {
                "batch": str(case["batch"]),
                "prompt": str(case["prompt_tokens"]),
                "engine": name,
                "decode tok/s": f"{own['decode_tokens_per_s']:,.1f}",
                "x none": f"{own['over_none']['median']:.2f}",
                "tokens/step": f"{own['tokens_per_step']['median']:.2f}",
                "window": f"{own['window']:.1f}",
                "ms/step": f"{step['median'] * 1e3:.2f}",
                "p10-p90": f"{step['p10'] * 1e3:.2f}-{step['p90'] * 1e3:.2f}",
                "floor ms": f"{own['floor_s'] * 1e3:.2f}",
                "of ceiling": f"{own['ceiling_share']:.0%}",
            }


def _memory_rows(report: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the bytes per row, which are the same for every batch."""
    own = report["memory"][0]
    for slots, size in own["row_bytes"].items():
        yield {
            "draft slots": slots,
            "MB a row": f"{size / 1e6:.2f}",
            "of it the state": f"{own['state_bytes'] / 1e6:.2f}",
            f"rows of {own['tokens']} tokens that fit": f"{own['rows'][slots]:,}",
        }
