"""While several callers run, a step's work is bounded by what fits its time limit."""

from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.config.tenant import Tenant
from specdec.core import work
from specdec.core.device.runner import HostDraftRunner
from specdec.core.outputs import Delta
from specdec.core.scheduler import Scheduler
from specdec.core.work import LEAST, STEP_S, WorkBudget
from specdec.errors import SpecdecError
from tests.core.test_fairness import ALICE, BOB, Crowd

EVEN = {"alice": 1.0, "bob": 1.0}


class Timed(Crowd):
    """A crowd whose step times are proportional to work, or increase from some step on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scheduler.clock = lambda: 0.0  # admits all at once, however slow the machine
        self.fitting = 100.0
        """Work of STEP_S seconds."""
        self.turns: list[dict[int, int]] = []
        """For each step, the computed tokens by request."""
        self.works: list[float] = []

    def step(self) -> list[tuple[int, int]]:
        told = super().step()
        budget = self.scheduler.work
        budget.observe(STEP_S * budget.total / self.fitting)
        self.turns.append(dict(told))
        self.works.append(budget.total)
        return told


def crowded(*, bobs: int = 1, alices: int = 200) -> Timed:
    crowd = Timed(slabs=800, max_running=300, chunk_tokens=1000)
    crowd.ask(BOB, bobs, max_tokens=60)
    crowd.ask(ALICE, alices, max_tokens=60)
    crowd.advance(8)
    return crowd


def bounds_steps() -> None:
    crowd = crowded()
    crowd.advance(30)
    assert max(crowd.works[8:]) <= 1.01 * crowd.fitting, "a step does more than it has time for"
    assert all(1 in turn for turn in crowd.turns), "Bob's stream has a token in every step"
    for number in range(2, 202):
        steps = [i for i, turn in enumerate(crowd.turns) if number in turn and i >= 8]
        gaps = [later - earlier for earlier, later in pairwise([8, *steps, len(crowd.turns)])]
        assert max(gaps) <= 3, "Alice's rows take turns"
    assert min(crowd.works[8:]) > 0.95 * crowd.fitting, "no time is left unused"


def test_rows_take_turns_where_a_step_has_no_time_for_all() -> None:
    bounds_steps()


def test_without_a_limit_a_step_would_do_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkBudget, "_room", lambda *_: work.MOST)
    with pytest.raises(AssertionError, match="more than it has time for"):
        bounds_steps()


def test_without_turns_some_rows_would_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_in_turn", lambda scheduler: scheduler.running)
    with pytest.raises(AssertionError, match="take turns"):
        bounds_steps()


def test_one_caller_alone_is_not_bounded() -> None:
    crowd = crowded(bobs=0)
    assert all(len(turn) == 200 for turn in crowd.turns[1:])


def test_a_step_is_divided_by_weight() -> None:
    crowd = Timed(slabs=800, max_running=300, chunk_tokens=1000)
    for tenant in (Tenant("bob", weight=3), ALICE):
        crowd.ask(tenant, 120, max_tokens=60)
    crowd.advance(32)
    bobs = [sum(number <= 120 for number in turn) for turn in crowd.turns[12:]]
    assert bobs == [75] * 20 and max(crowd.works[12:]) <= crowd.fitting


def work_of(prompt: int) -> float:
    """Return a prompt's work: a token after 1000 counts twice one without context."""
    return 1000.0 * prompt + prompt * (prompt - 1) / 2


def test_long_contexts_count() -> None:
    budget = WorkBudget(work_of)
    budget.begin(EVEN)
    budget.limit = 400.0 * 1000
    rows = [budget.take("alice", 1, 3000) for _ in range(400)]
    assert sum(rows) == 100
    assert budget.take("bob", 1, 3000) == 1, "he has his share"
    assert budget.fits("bob", 10, 0) and not budget.fits("alice", 1, 0)


def test_a_prompt_is_cut_to_what_fits() -> None:
    budget = WorkBudget(float)
    budget.begin(EVEN)
    budget.limit = 100.0
    assert budget.take("alice", 1000, 0) == 100
    assert budget.take("alice", 1000, 0) == 0
    assert budget.take("bob", 1000, 0) == 50
    budget.begin(EVEN)
    budget.limit = 0.5
    assert budget.take("alice", 1000, 0) == 1, "a caller's first row always goes on"


def test_the_limit_follows_what_steps_take() -> None:
    budget = WorkBudget(float)

    def step(work: int, seconds: float) -> float:
        budget.begin({})
        budget.take("", work, 0)
        budget.observe(seconds)
        return budget.limit

    assert step(10_000, 4 * STEP_S) == 2500, "too long: what would have fitted"
    assert step(1, STEP_S / 2) == 2500, "little work says nothing"
    assert step(2000, STEP_S / 8) == 4000, "no more than twice what was seen to fit"
    assert step(4000, STEP_S / 1.5) == pytest.approx(6000)
    assert step(1, 100 * STEP_S) == LEAST


def test_texts_do_not_depend_on_the_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside Bob's stream few of Alice's rows fit in a step, and fewer of their drafts."""
    monkeypatch.setattr(work, "LEAST", 4)
    monkeypatch.setattr(work, "STEP_S", 1e-9)
    sizes: list[int] = []
    params = SamplingParams(n=6, max_tokens=24, temperature=0.8, seed=5, presence_penalty=0.5)
    with SpecEngine("tiny", dtype="float32", adaptive=False) as engine:
        engine.model.core.loop.observers.append(lambda report: sizes.append(len(report.result.rows)))
        alone = _texts(engine, params, [ALICE])
        assert max(sizes) == 6
        sizes.clear()
        assert _texts(engine, params, [ALICE, BOB])[:6] == alone
        assert max(sizes) < 12


def test_recorded_steps_are_not_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of several callers fit in each, whatever the last host step used."""
    fits, fitted = WorkBudget.fits, list[bool]()
    settings = {"draft": "ngram", "topk": 1, "kernels": "cpu", "graphs": True, "adaptive": False}
    with SpecEngine(folder, dtype="float32", **settings) as engine:
        runner, budget = engine.model.loop.runner, engine.model.loop.scheduler.work
        assert isinstance(runner, HostDraftRunner)

        def watched(*args: Any) -> bool:
            fitted.extend([fits(*args)] if runner.batch.held else [])
            return fitted[-1] if runner.batch.held else fits(*args)

        monkeypatch.setattr(WorkBudget, "observe", lambda *_: None)
        monkeypatch.setattr(WorkBudget, "fits", watched)
        budget.limit = 40 * budget._each(0)
        _texts(engine, SamplingParams(n=6, max_tokens=24, temperature=0.05, seed=1), [ALICE, BOB])
    assert fitted and all(fitted)


def _texts(engine: SpecEngine, params: SamplingParams, tenants: list[Tenant]) -> list[str]:
    """Return the texts of one prompt per tenant, the first tenant's choices first."""
    texts, ended = [""] * (6 * len(tenants)), Event()
    left = len(texts)

    def emit(prompt: int, delta: Delta | SpecdecError) -> None:
        nonlocal left
        assert isinstance(delta, Delta), delta
        texts[6 * prompt + delta.index] += delta.text
        left -= delta.finish_reason is not None
        if not left:
            ended.set()

    prompt = "def fib(n):" if engine.tokenizer else [1, 2, 3]
    prepared = [engine.prepare(prompt, params, tenant=tenant) for tenant in tenants]
    engine.submit(prepared, emit)
    assert ended.wait(120)
    return texts
