"""An engine's statistics are the sums of its requests', and both match its steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specdec import Completion, SamplingParams, SpecEngine
from specdec.core.batch import StepReport
from tests.lossless.cases import SHAPES, Case, drafting_engine, preempt_each
from tests.models.agreeing import END

COUNT = 14
MODES: dict[str, dict[str, Any]] = {
    "none": {"draft": "none"},
    "mtp chain": {"draft": "mtp", "adaptive": False, **SHAPES["chain"]},
    "mtp tree": {"draft": "mtp", "adaptive": False, **SHAPES["tree"]},
    "auto": {"draft": "auto"},
    "synthetic": {"draft": "mtp", "adaptive": False, "num_steps": 4, "synthetic_acceptance": 2.7},
}


@dataclass
class Ledger:
    """An independent count of an engine's steps: by depth, drafts that reached it and were accepted."""

    drafted: int = 0
    reached: Counter[int] = field(default_factory=Counter)
    followed: Counter[int] = field(default_factory=Counter)

    @property
    def per_depth(self) -> list[float]:
        return [self.followed[depth] / self.reached[depth] for depth in sorted(self.reached)]


def watch(engine: SpecEngine) -> Ledger:
    ledger, loop = Ledger(), engine.model.loop

    def note(report: StepReport) -> None:
        for row, path in zip(report.result.rows, report.result.paths, strict=True):
            if not row.is_drafted:
                continue
            ledger.drafted += len(row.tree) - 1
            for depth, node in enumerate(path.nodes, start=1):
                # Below each accepted node a child was drafted, unless the draft ended there.
                if node in row.tree.parents:
                    ledger.reached[depth] += 1
                    ledger.followed[depth] += depth < len(path.nodes)

    loop.observers.append(note)
    return ledger


def ask(engine: SpecEngine, **changes: Any) -> list[Completion]:
    """Complete requests of several lengths together; none ends early."""
    prompts = [[(7 * i + 3 * j) % END for j in range(1 + i % 5)] for i in range(COUNT)]
    params = [
        SamplingParams(**{"max_tokens": 9 + i, "temperature": 0.0, "ignore_eos": True, **changes})
        for i in range(COUNT)
    ]
    return engine.generate(prompts, params)


def histogram_sums(histogram: dict[int, int]) -> tuple[int, int]:
    """Return a histogram's steps and accepted tokens."""
    return sum(histogram.values()), sum(accepted * steps for accepted, steps in histogram.items())


@pytest.mark.parametrize("mode", MODES)
def test_the_figures_of_a_request_agree_with_each_other(folder: Path, mode: str) -> None:
    with SpecEngine(folder, dtype="float64", **MODES[mode]) as engine:
        for own in ask(engine):
            stats = own.stats
            assert stats.output_tokens == len(own.token_ids) == own.stats.verified_tokens + 1
            assert stats.prompt_tokens == len(own.prompt_token_ids)
            assert histogram_sums(stats.histogram) == (stats.steps, stats.accepted)
            assert stats.verified_tokens == stats.steps + stats.accepted
            assert stats.acceptance_length == pytest.approx(1 + stats.accepted / stats.steps)
            assert stats.accepted <= stats.drafted and all(0 <= rate <= 1 for rate in stats.per_depth)
            assert stats.synthetic == (mode == "synthetic")
            assert (stats.drafted == 0) == (stats.per_depth == ())
            (here,) = stats.by_context.values()
            assert (here.steps, here.tokens) == (stats.steps, stats.verified_tokens)
            assert (here.drafted, here.accepted) == (stats.drafted, stats.accepted)


@pytest.mark.parametrize("mode", MODES)
def test_the_engines_figures_are_the_sum_of_its_requests(folder: Path, mode: str) -> None:
    with SpecEngine(folder, dtype="float64", **MODES[mode]) as engine:
        done = [*ask(engine), *ask(engine, temperature=0.8, seed=3)]
        found = engine.stats()
    each = [own.stats for own in done]
    assert found.steps == sum(stats.steps for stats in each)
    assert found.tokens == sum(stats.verified_tokens for stats in each)
    assert found.drafted == sum(stats.drafted for stats in each)
    assert found.accepted == sum(stats.accepted for stats in each)
    assert Counter(found.histogram) == sum((Counter(stats.histogram) for stats in each), Counter[int]())
    assert histogram_sums(found.histogram) == (found.steps, found.accepted)
    assert found.acceptance_length == pytest.approx(1 + found.accepted / found.steps)
    assert found.synthetic == (mode == "synthetic")
    assert (found.running, found.waiting) == (0, 0)
    assert found.accepted > 0 or mode in ("none", "auto")


@pytest.mark.parametrize("mode", ["mtp chain", "mtp tree", "synthetic"])
def test_shares_by_depth_are_of_the_drafts_that_got_there(folder: Path, mode: str) -> None:
    with SpecEngine(folder, dtype="float64", **MODES[mode]) as engine:
        ledger = watch(engine)
        ask(engine)
        found = engine.stats()
    assert found.drafted == ledger.drafted
    assert found.per_depth == pytest.approx(ledger.per_depth)
    assert found.accepted == ledger.followed.total()
    assert len(found.per_depth) == 4 and min(found.per_depth) > 0


def test_a_step_counts_where_its_context_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 tokens after a prompt of 6; the smallest context class is up to 8 tokens."""
    monkeypatch.setattr("specdec.core.stats.SHORTEST", 8)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with SpecEngine(folder, dtype="float64", **MODES["mtp chain"]) as engine:
        starts: Counter[int] = Counter()

        def note(report: StepReport) -> None:
            for row, taken in zip(report.result.rows, report.taken, strict=True):
                if row.is_decode:
                    length = len(row.request.tokens) - taken
                    starts[next(bound for bound in (8, 16, 32, 64) if length <= bound)] += 1

        engine.model.loop.observers.append(note)
        own = engine.generate([[5, 3, 8, 1, 4, 2]], params)[0].stats
        assert engine.stats().by_context == own.by_context
    assert {bound: sums.steps for bound, sums in own.by_context.items()} == starts
    assert set(starts) == {8, 16, 32, 64}


def test_a_chain_of_one_request_by_hand(folder: Path) -> None:
    """Fixed acceptance rates: all at depth 1, none at depth 2, which every draft reaches."""
    rates: dict[str, Any] = {"num_steps": 3, "synthetic_acceptance": [1.0, 0.0, 1.0]}
    params = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
    with SpecEngine(folder, dtype="float64", draft="mtp", adaptive=False, **rates) as engine:
        stats = engine.generate([5], params)[0].stats
    # The first token is from prefill; each step adds two.
    assert (stats.steps, stats.accepted, stats.histogram) == (10, 10, {1: 10})
    assert stats.acceptance_length == 2.0
    # The last step had space for one draft token and the bonus.
    assert stats.drafted == 9 * 3 + 1 and stats.per_depth[:2] == (1.0, 0.0)


def test_preempted_requests_count_each_token_and_step_once(folder: Path) -> None:
    with SpecEngine(folder, dtype="float64", **MODES["mtp tree"]) as engine:
        preempt_each(engine)
        done, found = ask(engine), engine.stats()
    assert found.preemptions == sum(own.stats.preemptions for own in done) == COUNT
    assert found.steps == sum(own.stats.steps for own in done)
    for own in done:
        stats = own.stats
        assert stats.output_tokens == len(own.token_ids)
        # Prefill gives one token, as may the prefill after a preemption.
        assert stats.output_tokens - 2 <= stats.verified_tokens <= stats.output_tokens - 1
        assert stats.verified_tokens == stats.steps + stats.accepted
        assert histogram_sums(stats.histogram) == (stats.steps, stats.accepted)


def told(folder: Path, **changes: Any) -> list[Case]:
    """Return plain decoding outputs that go beyond the later stops."""
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, **changes)
    prompts = [[(7 * i + 3) % END, i] for i in range(8)]
    with SpecEngine(folder, dtype="float64", draft="none") as engine:
        said = [engine.generate([prompt], params) for prompt in prompts]
    return [Case("", prompt, params, own) for prompt, own in zip(prompts, said, strict=True)]


def test_a_text_that_ends_within_what_was_accepted_rejects_nothing(folder: Path) -> None:
    """All drafts are correct; tokens after a stop count as neither reached nor rejected."""
    cases = told(folder)
    stops = [case.said[0].token_ids[6] for case in cases]
    params = [
        case.params.model_copy(update={"stop_token_ids": [stop]})
        for case, stop in zip(cases, stops, strict=True)
    ]
    with drafting_engine(folder, "oracle", cases, rate=1.0, **SHAPES["chain"]) as (engine, seen):
        done: Sequence[Completion] = engine.generate([case.prompt for case in cases], params)
        found = engine.stats()
    assert seen.overshot > 0 and all(own.finish_reason == "stop" for own in done)
    for own in done:
        stats = own.stats
        assert stats.verified_tokens == stats.output_tokens - 1
        assert stats.steps + stats.accepted - stats.verified_tokens in (0, 1), "the bonus of the last step"
        assert histogram_sums(stats.histogram) == (stats.steps, stats.accepted)
    assert set(found.per_depth) == {1.0}
