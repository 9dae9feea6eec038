"""`python -m tools.bench prefix`: TTFT of an engine with a prefix cache beside one without."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from specdec import Completion, EngineConfig, SamplingParams, SpecEngine
from specdec.bench.agreement import EXACT, require_rounding
from specdec.bench.report import ReportOutput, environment, percentile, publish, table, until_interrupted
from specdec.config.engine import PREFIX_FIELDS
from specdec.models.folder import find_folder
from tools.bench.options import PrefixOptions
from tools.bench.prefix.generate import LONGEST, Trace, TraceTurn, generate

RESULT = "prefix-engine.json"
LONGEST_OF = {"system-prompts": 4096}
"""Tokens of the longest requests of a kind; `LONGEST` for other kinds."""
WARMUP = 3
"""Uncounted requests that each engine answers first."""
LEGEND = """\
off, on: until the first token, without a cache and with one; x: speedup, above 1 is faster
hit: cached tokens, of all prompts'; differing: answers that differ from those without a cache"""


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """The answers of both engines to one request."""

    prompt: Sequence[int]
    off: Completion
    on: Completion

    @property
    def differs(self) -> bool:
        return self.off.token_ids != self.on.token_ids


class EnginePair:
    """Own both engines, each with its own weights."""

    def __init__(self, options: PrefixOptions, config: EngineConfig, stack: ExitStack) -> None:
        self.options = options
        folder = find_folder(options.model)
        self.off, self.on = (
            stack.enter_context(SpecEngine(folder, own, prefix_cache=keeps))
            for own, keeps in ((_without_cache(config), False), (config, True))
        )
        self.most = self.off.model.settings.max_model_len
        self.vocab = self.off.model.network.spec.vocab

    def trace(self, name: str) -> Trace:
        """Generate a trace of the requested length whose requests fit the model."""
        scale = min(self.most / LONGEST_OF.get(name, LONGEST), 1.0)
        count = self.options.requests
        whole = generate(
            *(name, self.options.seed),
            sessions=count,
            vocab=self.vocab,
            scale=scale,
            most=self.most - self.options.max_tokens,
        )
        return Trace(name, whole.turns[:count])

    def warm_up(self, trace: Trace) -> None:
        """Send both engines requests that share no prefix with the counted ones."""
        for turn in trace.turns[:WARMUP]:
            prompt = [(token + 1) % self.vocab for token in turn.prompt.tolist()]
            for engine in (self.off, self.on):
                engine.generate([prompt], self._params())

    def ask(self, trace: Trace) -> Iterator[AnswerPair]:
        """Send each request to both engines, alternating which is first.

        Earlier answers in a session are those of the engine without a cache, rather than the trace's invented
        ones.
        """
        said: dict[str, tuple[int, list[int]]] = {}
        for number, turns in enumerate(groups(trace.turns, self.options.together)):
            asked: list[tuple[TraceTurn, list[int]]] = []
            for turn in turns:
                known, before = said.get(turn.session, (0, []))
                prompt = [*before, *turn.prompt[known:].tolist()]
                if len(prompt) + self.options.max_tokens <= self.most:
                    asked.append((turn, prompt))
            order = (self.off, self.on) if number % 2 else (self.on, self.off)
            prompts = [prompt for _, prompt in asked]
            answers = {engine: engine.generate(prompts, self._params()) for engine in order}
            for (turn, prompt), off, on in zip(asked, answers[self.off], answers[self.on], strict=True):
                said[turn.session] = _whole_length(turn), [*prompt, *off.token_ids]
                yield AnswerPair(prompt, off, on)

    def check(self, pair: AnswerPair) -> None:
        """Raise if the prefix cache changed an output, unless the dtype's rounding can explain it."""
        model = self.off.model
        if not pair.differs or model.settings.dtype not in EXACT:
            return
        what = (
            f"a prompt of {len(pair.prompt)} tokens is answered otherwise where its first "
            f"{pair.on.stats.cached_tokens} were cached"
        )
        require_rounding(model, pair.prompt, self._params(), pair.off.token_ids, pair.on.token_ids, what)

    def _params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.options.max_tokens, temperature=0.0, ignore_eos=True, seed=self.options.seed
        )


class PrefixBenchRun:
    """Own both engines' answers so far, by trace."""

    def __init__(self, engines: EnginePair) -> None:
        self.engines = engines
        self.done: dict[str, list[AnswerPair]] = {}

    def measure(self) -> None:
        """Send each trace's requests; Ctrl-C keeps those that both engines have answered."""
        for name in dict.fromkeys(self.engines.options.trace):
            trace = self.engines.trace(name)
            self.engines.warm_up(trace)
            with tqdm(
                total=len(trace.turns), desc=name, unit="request", leave=False, disable=None
            ) as progress:
                for pair in self.engines.ask(trace):
                    self.engines.check(pair)
                    self.done.setdefault(name, []).append(pair)
                    progress.update()

    def report(self, *, interrupted: bool) -> dict[str, Any]:
        """Build the report of the finished requests."""
        options, settings = self.engines.options, self.engines.off.model.settings
        return {
            "benchmark": "prefix-engine",
            **environment(),
            "model": str(options.model),
            "device": str(settings.device),
            "dtype": str(settings.dtype).removeprefix("torch."),
            "drafters": list(settings.drafters),
            "seed": options.seed,
            "warmup": WARMUP,
            "max_tokens": options.max_tokens,
            "together": options.together,
            "interrupted": interrupted,
            "records": [{"trace": name, **summarise_pairs(pairs)} for name, pairs in self.done.items()],
        }


def run(options: PrefixOptions, config: EngineConfig, out: ReportOutput) -> None:
    """Time both engines on each trace and publish the report.

    Ctrl-C is raised again once the finished part has been published.
    """
    if out.path:
        out.path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        whole = PrefixBenchRun(EnginePair(options, config, stack))
        with until_interrupted(whole.done) as interruption:
            whole.measure()
        report = whole.report(interrupted=interruption.happened)
    publish(render(report), report, out.within(RESULT))
    if interruption.happened:
        raise KeyboardInterrupt


def groups(turns: Sequence[TraceTurn], most: int) -> Iterator[list[TraceTurn]]:
    """Cut a trace into groups of concurrent requests: no two of a group belong to one session."""
    group: list[TraceTurn] = []
    for turn in turns:
        if len(group) == most or any(turn.session == other.session for other in group):
            yield group
            group = []
        group.append(turn)
    yield group


def summarise_pairs(pairs: Sequence[AnswerPair]) -> dict[str, Any]:
    """Summarise both engines' answers to a trace."""
    off_s, on_s = ([getattr(pair, side).stats.first_token_s for pair in pairs] for side in ("off", "on"))
    off, on = _percentiles(off_s), _percentiles(on_s)
    tokens, hit = sum(len(p.prompt) for p in pairs), sum(p.on.stats.cached_tokens for p in pairs)
    return {
        "requests": len(pairs),
        "tokens": tokens,
        "tokens_hit": hit,
        "hit_rate": hit / tokens,
        "differing_texts": sum(pair.differs for pair in pairs),
        "ttft_off_s": off,
        "ttft_on_s": on,
        "speedup": {name: off[name] / on[name] for name in off},
    }


def render(report: Mapping[str, Any]) -> str:
    """Format the report."""
    drafts = ", ".join(report["drafters"]) or "none"
    lines = [
        f"{report['model']}: {report['dtype']} on {report['device']}, drafts: {drafts}",
        f"{report['cpu']}, {report['threads']} threads; commit {report['commit']}; seed {report['seed']}",
        f"{report['together']} requests at a time",
    ]
    if report["interrupted"]:
        lines.append("INTERRUPTED: these are the requests that both had answered by then")
    return "\n".join([*lines, "", table([_row(record) for record in report["records"]]), "", LEGEND])


def _row(record: Mapping[str, Any]) -> dict[str, str]:
    row = {
        "trace": record["trace"],
        "requests": str(record["requests"]),
        "hit %": f"{100 * record['hit_rate']:.1f}",
        "differing": str(record["differing_texts"]),
    }
    for name in ("p50", "p95"):
        off, on = record["ttft_off_s"][name], record["ttft_on_s"][name]
        row |= {f"{name} off ms": f"{1e3 * off:.1f}", f"{name} on ms": f"{1e3 * on:.1f}"}
        row[f"{name} x"] = f"{record['speedup'][name]:.2f}"
    return row


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(seconds, 0.5), "p95": percentile(seconds, 0.95)}


def _without_cache(config: EngineConfig) -> EngineConfig:
    """Drop the prefix cache's settings, which an engine without one refuses."""
    return EngineConfig.of(None, config.model_dump(exclude_unset=True, exclude=set(PREFIX_FIELDS)))


def _whole_length(turn: TraceTurn) -> int:
    return len(turn.prompt) + len(turn.output)
