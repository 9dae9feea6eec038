"""Prefill and decode speed by batch and length, beside other engines in the same run.

Tokens are checked against the logits of `transformers`, or for GGUF files against the engine's own in one
pass.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.agreement import EXCUSED_GAP, agreement, require_same_model, rounding
from specdec.bench.bandwidth import BandwidthProbe, cache_bytes
from specdec.bench.llama_cpp import LlamaCppPeer, find_program, settings_for
from specdec.bench.options import LLAMA_CPP, SpeedOptions, ThroughputOptions, refuse_ranks
from specdec.bench.peers import Contestant, Sample, TransformersPeer, connect, refuse_unknown
from specdec.bench.random_model import cached_checkpoint, quiet_transformers, shape_config
from specdec.bench.report import (
    ReportOutput,
    SampleSummary,
    environment,
    publish,
    setup_line,
    summarise,
    table,
    until_interrupted,
)
from specdec.bench.runner import ENGINE, EngineRunner
from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError, EngineError
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import stored_format
from specdec.setup.footprint import Footprint, measure_stored

RANDOM_DRAFTS = (
    "random weights: drafts cannot gain here, since few are accepted; use --synthetic-acceptance "
    "to time accepted drafts"
)
"""Note in the report on drafts with random weights."""


class Oracle(Protocol):
    """Judge greedy tokens by logits."""

    name: str

    def judge(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ThroughputCase:
    batch: int
    prompt_tokens: int

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        """Draw the prompts, which depend only on the seed and the case."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocab, (self.batch, self.prompt_tokens), generator=generator).tolist()


@dataclass(slots=True)
class CaseResult:
    """One case's samples by contestant, and the result of the check."""

    case: ThroughputCase
    agreement: Mapping[str, float]
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    peers: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """The agreement of each peer that reports its tokens."""


def benchmark(options: ThroughputOptions, config: EngineConfig) -> dict[str, Any]:
    """Check, measure, and return the report."""
    with ExitStack() as servers:
        return _benchmark(options, config, servers)


def _benchmark(options: ThroughputOptions, config: EngineConfig, servers: ExitStack) -> dict[str, Any]:
    refuse_unknown(options.peers)
    refuse_ranks(config)
    program = find_program(options.llama_server) if LLAMA_CPP in options.peers else None
    folder = (
        Checkpoint(options.model).folder
        if options.model
        else cached_checkpoint(shape_config(options.shape), seed=options.seed or 0)
    )
    checkpoint = Checkpoint(folder)
    if checkpoint.gguf_file and TransformersPeer.name in options.peers:
        raise ConfigError(
            "peers: transformers runs safetensors; leave it out, or give such a checkpoint instead of a GGUF "
            "file",
            field="peers",
        )
    engine = EngineRunner.load(folder, _with_room(config, options))
    settings, spec = engine.model.settings, engine.model.network.spec
    plain = engine.plain() if settings.drafters else engine
    transformers = (
        None
        if checkpoint.gguf_file
        else TransformersPeer(folder, dtype=settings.dtype, device=settings.device)
    )
    oracle = transformers or plain
    llama_cpp: list[Contestant] = []
    if LLAMA_CPP in options.peers:
        largest = max(options.batch), max(options.prompt_tokens)
        for wanted in settings_for(checkpoint, engine.model, program, *largest, options.new_tokens):
            llama_cpp.append(servers.enter_context(closing(LlamaCppPeer(wanted))))
    contestants: list[Contestant] = [engine, *connect(options.peers, transformers, llama_cpp)]
    if plain is not engine:
        contestants.insert(1, plain)
    rounded = rounding(settings, stored_format(checkpoint.config))
    results, bandwidth = _measure(options, engine, plain, oracle, contestants, exact=not rounded)
    footprint = measure_stored(checkpoint, spec, settings)
    interrupted = len(results) < len(_cases(options))
    return {
        "benchmark": "throughput",
        **environment(),
        "model": str(options.model) if options.model else None,
        "shape": None if options.model else options.shape,
        "family": spec.family,
        "parameters": footprint.parameters,
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "rounding": rounded,
        "settings": config.model_dump(exclude_unset=True),
        "seed": options.seed or 0,
        "new_tokens": options.new_tokens,
        "warmup": options.warmup,
        "repeats": options.repeats,
        "read_bytes_per_s": bandwidth._asdict(),
        "contestants": {contestant.name: contestant.describe() for contestant in contestants},
        "interrupted": interrupted,
        "oracle": oracle.name,
        "weight_bytes": footprint.weight_bytes,
        "cache_bytes": cache_bytes(settings.device),
        "cases": [_case_report(result, footprint, bandwidth.median) for result in results],
    }


def run(options: ThroughputOptions, config: EngineConfig, out: ReportOutput) -> None:
    """Measure and publish the report; publish nothing if the check fails.

    Ctrl-C is raised again once the finished cases have been published.
    """
    with quiet_transformers():
        report = benchmark(options, config)
    publish(render(report), report, out)
    if report["interrupted"]:
        raise KeyboardInterrupt


def _measure(
    options: ThroughputOptions,
    engine: EngineRunner,
    plain: EngineRunner,
    oracle: Oracle,
    contestants: Sequence[Contestant],
    *,
    exact: bool,
) -> tuple[list[CaseResult], SampleSummary]:
    """Run every case: the check, the warm-up, the contestants in turn, then the bandwidth probe.

    Ctrl-C keeps the finished cases, if any.
    """
    spec, settings = engine.model.network.spec, engine.model.settings
    probe, bandwidths = BandwidthProbe(settings.device), []
    results: list[CaseResult] = []
    cases = _cases(options)
    own = {engine.name, plain.name, oracle.name}
    total = len(cases) * (1 + options.warmup + options.repeats)
    with until_interrupted(results), tqdm(total=total, leave=False, disable=None) as progress:
        for number, case in enumerate(cases, 1):
            of_all = f"case {number} of {len(cases)}"
            progress.set_description(f"{of_all}: batch {case.batch}, prompt {case.prompt_tokens}")
            prompts = case.prompts(spec.vocab, options.seed or 0)
            # With synthetic acceptance the text is wrong by design; check plain decoding instead.
            judged = plain if settings.synthetic else engine
            result = CaseResult(case, check(judged, oracle, prompts, options.new_tokens, exact=exact))
            progress.update()
            for repeat in range(-options.warmup, options.repeats):
                for contestant in contestants:
                    sample = contestant.run(prompts, options.new_tokens)
                    if repeat >= 0:
                        result.samples.setdefault(contestant.name, []).append(sample)
                    if repeat == 0 and sample.token_ids and contestant.name not in own:
                        found = agreement(oracle.judge(prompts, sample.token_ids))
                        require_same_model(contestant.name, found, result.agreement, oracle.name)
                        result.peers[contestant.name] = found
                progress.update()
            # After the runs rather than between them: the probe evicts everything from the CPU's caches.
            bandwidths += [probe.bytes_per_second() for _ in range(options.repeats)]
            results.append(result)
    return results, summarise(bandwidths)


def _cases(options: ThroughputOptions) -> list[ThroughputCase]:
    return [ThroughputCase(*pair) for pair in itertools.product(options.batch, options.prompt_tokens)]


def _with_room(config: EngineConfig, options: ThroughputOptions) -> EngineConfig:
    """Size the engine for the largest case, unless the user did.

    One step can prefill a whole batch, as in the peers. Otherwise the first rows would decode while the last
    are prefilled, and with accepted drafts finish before all rows decode.
    """
    prompts = max(options.batch) * max(options.prompt_tokens)
    room = EngineConfig(
        max_running=max(options.batch),
        max_model_len=longest(options, config),
        chunk_tokens=max(prompts, EngineConfig().chunk_tokens),
    )
    return EngineConfig.of(room, config.model_dump(exclude_unset=True))


def longest(options: SpeedOptions, config: EngineConfig, *, watched: int = 0) -> int:
    """Return the length that the largest case needs; refuse a smaller `max_model_len`.

    `watched` tokens are decoded for the profile after the cases.
    """
    needed = max(options.prompt_tokens) + max(options.new_tokens, watched) + 1
    if config.max_model_len is not None and config.max_model_len < needed:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is less than the {needed} tokens that are measured "
            "(prompt, new tokens and one more); raise it or measure less",
            field="max_model_len",
        )
    return needed


def check(
    engine: EngineRunner, oracle: Oracle, prompts: Sequence[Sequence[int]], new_tokens: int, *, exact: bool
) -> dict[str, float]:
    """Compare each token of the engine with the oracle's logits for the same text.

    With exact dtypes, raise if a token is further under the best one than rounding explains.
    """
    outputs = engine.run(prompts, new_tokens).token_ids
    assert outputs is not None
    gap_BT = oracle.judge(prompts, outputs)
    if exact:
        _refuse(gap_BT, oracle.name)
    return agreement(gap_BT)


def _refuse(gap_BT: Tensor, oracle: str) -> None:
    """Raise if a gap exceeds rounding or is NaN."""
    wrong = (~(gap_BT <= EXCUSED_GAP)).nonzero().tolist()
    if wrong:
        row, place = wrong[0]
        raise EngineError(
            f"{len(wrong)} of {gap_BT.numel()} greedy tokens differ from {oracle}, first in row {row} at "
            f"output token {place} (its logit lies {gap_BT[row, place]:.2g} under the best, relative to the "
            "largest); no figure is shown for a result that is wrong"
        )


def _case_report(result: CaseResult, footprint: Footprint, bandwidth: float) -> dict[str, Any]:
    case = result.case
    own = result.samples[ENGINE]
    figures = {}
    for name, samples in result.samples.items():
        prefill_s = summarise([sample.prefill_s for sample in samples])
        step_s = summarise([s for sample in samples for s in sample.step_s])
        figures[name] = {
            "prefill_s": prefill_s._asdict(),
            "prefill_tokens_per_s": case.batch * case.prompt_tokens / prefill_s.median,
            "step_s": step_s._asdict(),
            "tokens_per_step": summarise([sample.tokens_per_step for sample in samples])._asdict(),
            "decode_tokens_per_s": case.batch / summarise([sample.token_s for sample in samples]).median,
            "bandwidth_share": footprint.step_bytes(case.batch) / step_s.median / bandwidth,
            "prefill_speedup": _speedup(samples, own, _prefill_s)._asdict(),
            "decode_speedup": _speedup(samples, own, _token_s)._asdict(),
        }
    return {
        "batch": case.batch,
        "prompt_tokens": case.prompt_tokens,
        "agreement": result.agreement,
        "peers": result.peers,
        "figures": figures,
    }


def _prefill_s(sample: Sample) -> float:
    return sample.prefill_s


def _token_s(sample: Sample) -> float:
    return sample.token_s


def _speedup(
    theirs: Sequence[Sample], own: Sequence[Sample], time_s: Callable[[Sample], float]
) -> SampleSummary:
    """Return their speed relative to ours, above 1 if they are faster.

    Runs are compared in pairs: a disturbance of the machine slows both sides of a ratio.
    """
    return summarise([time_s(b) / time_s(a) for a, b in zip(theirs, own, strict=True)])


def render(report: Mapping[str, Any]) -> str:
    """Format the report."""
    what = report["model"] or f"random weights of shape {report['shape']}"
    lines = [
        f"{what}: {report['family']}, {report['parameters'] / 1e6:,.1f} M parameters, {report['dtype']}",
        setup_line(report),
        f"memory read at {report['read_bytes_per_s']['median'] / 1e9:.1f} GB/s, measured in this run",
        f"checked: {_shown([case['agreement'] for case in report['cases']], report['oracle'])}"
        + (f"; informational with {report['rounding']}" if report["rounding"] else ""),
    ]
    for name, said in report["contestants"].items():
        if note := said.get("note"):
            lines.append(f"{name}: {note}")
        if checked := [case["peers"][name] for case in report["cases"] if name in case["peers"]]:
            lines.append(f"{name}: {_shown(checked, report['oracle'])}")
    if (rates := report["contestants"][ENGINE]["synthetic_acceptance"]) is not None:
        shown = ", ".join(f"{rate:.2f}" for rate in rates)
        lines.append(
            f"SYNTHETIC ACCEPTANCE: drafts are accepted at rates {shown} by depth, whatever they say"
        )
    elif not report["model"] and report["contestants"][ENGINE]["drafters"]:
        lines.append(RANDOM_DRAFTS)
    if report["interrupted"]:
        lines.append(f"INTERRUPTED: these {len(report['cases'])} cases were finished by then")
    lines += ["", table(list(_rows(report)))]
    lines += ["", *legend("speedup: speed over specdec's, above 1 is faster", synthetic=rates is not None)]
    return "\n".join(lines)


def _shown(checked: Sequence[Mapping[str, float]], oracle: str) -> str:
    """Describe how many tokens of all cases agree, and how far off the others are."""
    tokens, equal = (sum(case[key] for case in checked) for key in ("tokens", "equal"))
    worst = max(case["largest_gap"] for case in checked)
    mean = sum(case["mean_gap"] * case["tokens"] for case in checked) / tokens
    return f"{equal} of {tokens} greedy tokens are the argmax of {oracle}" + (
        f"; the others' logits are at most {worst:.1g} of the largest below it, {mean:.1g} on average"
        if equal < tokens
        else ""
    )


def legend(ratio: str, *, synthetic: bool) -> list[str]:
    """Explain the columns, including ratios as named in the table."""
    lines = [
        "ms/step: median of steps; decode tok/s: batch over a row's mean time per token, median of repeats",
        f"tokens/step: tokens per row and step, mean of a repeat; {ratio} in the same repeat, median",
    ]
    if synthetic:
        lines.append(
            "the synthetic length is that of full drafts; smaller ones, as at the end of an output, gain less"
        )
    return lines


def _rows(report: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for case in report["cases"]:
        for name, figures in case["figures"].items():
            step, share = figures["step_s"], figures["bandwidth_share"]
            # Weights that fit a cache say nothing about memory, which the share refers to.
            cached = report["weight_bytes"] <= report["cache_bytes"] or share > 1
            yield {
                "batch": str(case["batch"]),
                "prompt": str(case["prompt_tokens"]),
                "engine": name,
                "prefill tok/s": f"{figures['prefill_tokens_per_s']:,.0f}",
                "prefill speedup": f"{figures['prefill_speedup']['median']:.2f}",
                "decode tok/s": f"{figures['decode_tokens_per_s']:,.1f}",
                "ms/step": f"{step['median'] * 1e3:.2f}",
                "p10-p90": f"{step['p10'] * 1e3:.2f}-{step['p90'] * 1e3:.2f}",
                "tokens/step": f"{figures['tokens_per_step']['median']:.2f}",
                "decode speedup": f"{figures['decode_speedup']['median']:.2f}",
                "bandwidth": "in the cache" if cached else f"{share:.0%}",
            }
