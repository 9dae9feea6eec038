"""Taped CPU steps, and look-ups and unprefilled head tokens between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from specdec import EngineConfig, SamplingParams, SpecEngine
from specdec.core.device.lookups import HostLookups
from specdec.core.device.runner import DeviceDraftRunner, Runner
from specdec.core.device.steps import Steps
from specdec.core.device.taped import TapedStep, TapedSteps
from specdec.draft.policy import Policy
from specdec.draft.proposal import DraftShape
from specdec.kernels.native import tape
from specdec.kernels.native.compiled import compiled
from specdec.kernels.native.tape import Tapes
from specdec.setup.build import build
from tests.lossless.cases import LONGEST, SHAPES, Case, differences, drafting_engine, generate, plain_cases

needs_c = pytest.mark.skipif(compiled() is None, reason="no C compiler was found")
FEATURES = ("greedy", "temperature", "filters", "stop")


@pytest.fixture(scope="module")
def known(folder: Path) -> list[Case]:
    return [case for case in plain_cases(folder) if case.feature in FEATURES]


def runner_of(engine: SpecEngine) -> DeviceDraftRunner:
    runner = engine.model.loop.runner
    assert isinstance(runner, DeviceDraftRunner)
    return runner


def said_by(engine: SpecEngine, cases: Sequence[Case]) -> list[tuple[tuple[int, ...], str]]:
    """Complete the cases together, and some one by one."""
    done = [own for each in generate(engine, cases) for own in each]
    alone = [case for n, case in enumerate(cases) if n < 2 or case.feature == "filters"]
    done += [own for case in alone for own in engine.generate([case.prompt], case.params)]
    return [(own.token_ids, own.text) for own in done]


@needs_c
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "draft", "shape", "backing"),
    [
        ("qwen3_5", "none", "chain", "record"),
        ("qwen3_5", "mtp", "chain", "record"),
        ("qwen3_5", "mtp", "tree", "snapshot"),
        ("qwen3_5", "eagle", "tree", "record"),
        ("qwen3", "eagle", "chain", "record"),
        ("qwen3_5", "block", "tree", "record"),
        ("qwen3", "block", "chain", "record"),
    ],
)
def test_a_taped_step_says_what_it_says_as_it_stands(
    family_folder: Any, known: list[Case], family: str, draft: str, shape: str, backing: str, dtype: str
) -> None:
    fields = {"draft": draft, "dtype": dtype, "graphs": True, "slots": backing, "max_model_len": LONGEST}
    if draft != "none":
        fields |= {"adaptive": False, **SHAPES[shape]}
    said = []
    for tapes in (True, False):
        with SpecEngine(family_folder(family), **fields) as engine:
            batch = runner_of(engine).batch
            assert isinstance(batch.steps, TapedSteps)
            if tapes:
                said.append(said_by(engine, known))
                found = batch.steps._tapes._by_key
                assert len(found) > 1 and all(isinstance(own, TapedStep) for own in found.values())
                assert any(key.filtered for _, key, _ in found)
            else:
                batch.steps = Steps(batch.step, batch.rows)
                said.append(said_by(engine, known))
    assert said[0] == said[1]


@pytest.mark.parametrize("backing", ["record", "snapshot"])
@pytest.mark.parametrize("draft", ["mtp", "eagle", "block"])
def test_a_head_that_rests_reads_on_where_it_drafts_again(
    folder: Path, known: list[Case], draft: str, backing: str
) -> None:
    """Shapes alternate randomly, and with them the pending tokens of the head."""
    with drafting_engine(
        folder, draft, known, graphs=True, slots=backing, adaptive=True, **SHAPES["tree"]
    ) as (engine, _):
        runner, rng = runner_of(engine), Random(3)
        shapes, seen = runner.policy.shapes, set[bool]()

        def choose(rows: object) -> DraftShape | None:
            seen.add(runner.batch.reads)
            return rng.choice(shapes) if rng.random() < 0.4 else None

        runner.policy.choose = choose  # type: ignore[method-assign]
        for _ in range(3):
            assert differences(known, generate(engine, known)) == []
        assert seen == {True, False} and engine.stats().accepted > 0
        head = engine.model.loop.speculation.head
        assert head is not None and not head._unread


@contextmanager
def looking(folder: Path, **fields: Any) -> Iterator[tuple[SpecEngine, list[int]]]:
    """Open an engine with a head and look-ups; list the number of rows with a look-up draft in each step."""
    settings = {"draft": "auto", "graphs": True, "dtype": "float64", "max_model_len": LONGEST}
    with SpecEngine(folder, **{**settings, **fields}) as engine:
        runner, used = runner_of(engine), list[int]()
        assert isinstance(runner.look_ups, HostLookups)
        find = runner.look_ups.find

        def watched(*given: Any) -> Any:
            found = find(*given)
            used.append(sum(own is not None for own in found))
            return found

        runner.look_ups.find = watched  # type: ignore[method-assign]
        yield engine, used
        engine.flush()


@pytest.mark.parametrize("drafts", [True, False], ids=["beside a head", "while it rests"])
@pytest.mark.parametrize("backing", ["record", "snapshot"])
def test_what_is_looked_up_changes_no_text(
    folder: Path, known: list[Case], backing: str, drafts: bool
) -> None:
    """Some rows draft from earlier outputs by look-up; others verify a head's drafts."""
    with looking(folder, slots=backing, **SHAPES["tree"]) as (engine, used):
        runner = runner_of(engine)
        shapes = [DraftShape(1, 1, 2), runner.policy.bounds] if drafts else [None]
        rng = Random(5)
        runner.policy.choose = lambda rows: rng.choice(shapes)  # type: ignore[method-assign]
        runner.policy.cost = lambda *_: 1.0  # type: ignore[method-assign]
        # Sometimes a look-up does not pay.
        runner.policy.cost_of_found = lambda *_: rng.choice([1.0, 1.0, 1.0, 9.0])  # type: ignore[method-assign]
        # Which requests share a step depends on thread timing, and so does how often a look-up pays.
        for turn in range(12):
            if turn >= 3 and sum(used) > 20:
                break
            assert differences(known, generate(engine, known)) == []
        assert sum(used) > 20 and 0 in used
        assert engine.stats().accepted > 20


def test_what_is_seldom_of_use_is_seldom_looked_up(folder: Path) -> None:
    with looking(folder, **SHAPES["tree"]) as (engine, used):
        runner = runner_of(engine)
        asked: list[int] = []
        look_up = engine.model.loop.speculation.look_up

        def watched(requests: Any) -> Any:
            asked.append(len(requests))
            return look_up(requests)

        engine.model.loop.speculation.look_up = watched  # type: ignore[method-assign]
        runner.policy.cost_of_found = lambda *_: 1e9  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=40, temperature=1.5, seed=1, ignore_eos=True)
        engine.generate([[1, 2, 3]] * 2, params)
        assert sum(used) == 0 and 0 < len(asked) < len(used) / 2


@needs_c
def test_a_warm_up_leaves_nothing_behind(folder: Path) -> None:
    """Neither does an engine after `disable_sharing`: all its memory is free."""
    with SpecEngine(folder, draft="mtp", dtype="float32", max_model_len=LONGEST) as engine:
        assert engine.stats().prefixes and not engine.stats().prefixes.cached_bytes
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        engine.generate([[1, 2, 3, 4] * 4] * 2, params)
        engine.model.loop.disable_sharing()
        engine.generate([[1, 2, 3, 4] * 4] * 2, params)
        engine.model.loop.check_idle()
        assert engine.stats().failed_steps == 0


@needs_c
def test_a_cpu_plays_tapes_by_default(folder: Path, family_folder: Any) -> None:
    """Except with experts, whose products depend on routing."""
    experts = family_folder("qwen3_5_moe")
    for model, draft, expected in (
        (folder, "none", True),
        (folder, "mtp", True),
        (folder, "auto", True),
        (folder, "suffix", True),
        (experts, "mtp", False),
    ):
        with SpecEngine(model, draft=draft, dtype="float32", max_model_len=LONGEST) as engine:
            runner: Runner | None = engine.model.loop.runner
            assert (runner is not None and isinstance(runner.batch.steps, TapedSteps)) == expected


@needs_c
@pytest.mark.parametrize("rests", [False, True])
def test_steps_are_recorded_while_nothing_runs(folder: Path, known: list[Case], rests: bool) -> None:
    """Before a request and between two, but not while one runs or after memory was released."""
    core = build(folder, EngineConfig(draft="auto", dtype="float32", max_model_len=LONGEST)).core
    loop, case = core.loop, known[0]
    assert loop.runner and isinstance(loop.runner.batch.steps, TapedSteps)
    forms, keys = loop.runner.batch.steps._tapes._by_key, loop.runner.graph_keys()

    def run() -> list[int]:
        request = core.add_request(core.new_request(case.prompt, case.params, seed=case.params.seed or 0))
        core.step()
        assert not core.prepare()
        core.run_until_idle()
        return request.tokens

    few = len(forms)
    assert (
        core.prepare()
        and core.prepare()
        and len(forms) > few
        and not {form[1] for form in forms} >= set(keys)
    )
    cold = run()
    if rests:
        core.rest()
        assert not core.prepare()
        core.wake()
    # Cached blocks are not written: padding uses the dummy slab, the first one.
    first, before = loop.arena.layout.slab_bytes, loop.arena.data.clone()
    assert rests or loop.arena.held
    while core.prepare():
        core.check_idle()
    assert torch.equal(before[first:], loop.arena.data[first:]) and {form[1] for form in forms} >= set(keys)
    assert run() == cold
    core.close()


@needs_c
def test_a_recording_that_fails_ahead_ends_no_request(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = build(folder, EngineConfig(draft="mtp", dtype="float32", max_model_len=LONGEST)).core
    assert core.loop.runner and isinstance(core.loop.runner.batch.steps, TapedSteps)
    run, step = core.loop.runner.batch.steps, core.loop.runner.batch.steps.step
    request = core.add_request(core.new_request([1, 2, 3], SamplingParams(max_tokens=20), seed=0))
    core.run_until_idle()
    held = core.loop.arena.held

    def fail(*_: object) -> None:
        raise RuntimeError("planned")

    run.step = fail  # type: ignore[assignment]
    assert core.prepare() and not core.prepare() and "recording a step ahead failed" in caplog.text
    run.step = step
    assert core.loop.arena.held == held and core.failed_steps == 0, "what is cached stays"
    again = core.add_request(core.new_request([1, 2, 3], SamplingParams(max_tokens=20), seed=0))
    core.run_until_idle()
    assert again.tokens == request.tokens
    core.close()


@needs_c
def test_what_is_too_large_is_taped_once_and_then_the_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5], [6]]
    with SpecEngine(folder, draft="none", dtype="float32", max_model_len=LONGEST) as engine:
        said = [own.token_ids for own in engine.generate(prompts, params)]
    with SpecEngine(folder, draft="none", dtype="float32", max_model_len=LONGEST) as engine:
        runner, recorded = runner_of(engine), list[Any]()
        monkeypatch.setattr(tape, "MOST_BYTES", 1)
        keep = Tapes.keep

        def kept(self: Any, form: Any, own: Any) -> None:
            recorded.append(form)
            keep(self, form, own)

        monkeypatch.setattr(Tapes, "keep", kept)
        for _ in range(2):
            assert [own.token_ids for own in engine.generate(prompts, params)] == said
        steps = [form for form in recorded if form[0] == "step"]
        assert 0 < len(steps) == len(set(steps)) == runner.steps


@pytest.mark.parametrize("speculates", [True, False])
def test_a_resting_head_keeps_little_unread(folder: Path, speculates: bool) -> None:
    settings: dict[str, Any] = {"dtype": "float64", "max_model_len": LONGEST, "chunk_tokens": 8}
    with SpecEngine(folder, draft="mtp", graphs=True, **settings) as engine:
        runner, most = runner_of(engine), [0]
        if speculates:
            runner.policy.choose = lambda rows: None  # type: ignore[method-assign]
        head = engine.model.loop.speculation.head
        assert head is not None

        def watch(report: object) -> None:
            most[0] = max([most[0], *(unread.count for unread in head._unread.values())])

        engine.model.loop.observers.append(watch)
        params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True, speculate=speculates)
        engine.generate([[1, 2, 3]], params)
        assert 8 <= most[0] <= 8 + 2 and engine.stats().drafted == 0


def test_what_was_chosen_for_some_is_not_for_others(folder: Path) -> None:
    """A batch that fails to load leaves no draft choice or look-up for the next."""
    with SpecEngine(folder, draft="mtp", dtype="float64", graphs=True, max_model_len=LONGEST) as engine:
        runner = runner_of(engine)
        runner.policy.choose = lambda rows: runner.policy.bounds  # type: ignore[method-assign]
        begin, calls = runner.batch.begin, [0]

        def fails_once(*given: Any, **named: Any) -> bool:
            calls[0] += 1
            return calls[0] > 3 and begin(*given, **named)

        runner.batch.begin = fails_once  # type: ignore[method-assign]
        drafts = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        plain = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, speculate=False)
        engine.generate([[1, 2, 3]], drafts)
        engine.generate([[4, 5, 6]], plain)
        assert engine.stats().drafted == 0 or calls[0] > 3
        before = engine.stats().drafted
        engine.generate([[4, 5, 6]], plain)
        assert engine.stats().drafted == before


FILTERS: dict[str, Any] = {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01}


@needs_c
@pytest.mark.parametrize("draft", ["none", "suffix", "mtp"])
def test_filtered_texts_of_tape_and_host_are_the_same(folder: Path, draft: str) -> None:
    """Requests with log-probabilities run on the host, which must not change a token."""
    asked: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "seed": 3, **FILTERS}
    with SpecEngine(folder, draft=draft, dtype="float32", max_model_len=LONGEST) as engine:
        taped = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(**asked))
        assert engine.stats().device_steps > 0
        before = engine.stats().device_steps
        host = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(**asked, logprobs=1))
        assert engine.stats().device_steps == before
    assert [own.token_ids for own in taped] == [own.token_ids for own in host]


@needs_c
def test_what_the_host_makes_is_counted_by_why_and_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    asked = {
        "penalties, biases, structured output or log-probabilities": {"logprobs": 1},
    }
    with SpecEngine(folder, draft="mtp", dtype="float32", max_model_len=LONGEST) as engine:
        assert not engine.stats().device_steps and not engine.stats().host_steps
        engine.generate([[1, 2, 3]], greedy)
        stats = engine.stats()
        assert stats.device_steps > 0 and stats.seconds["whole"] > 0
        assert list(stats.host_steps) == ["prefill"]
        engine.generate([[1, 2, 3], [4, 5]], greedy)
        assert engine.stats().host_steps["drafts for several rows"] > 0
        before = engine.stats()
        engine.generate([[1, 2, 3]], SamplingParams(**{**greedy.model_dump(), **FILTERS}))
        assert engine.stats().device_steps > before.device_steps
        for why, fields in asked.items():
            before = engine.stats()
            for _ in range(2):
                engine.generate([[1, 2, 3]], SamplingParams(**{**greedy.model_dump(), **fields}))
            stats = engine.stats()
            assert stats.device_steps == before.device_steps and stats.host_steps[why] > 1
            assert sum(why in record.getMessage() for record in caplog.records) == 1


@needs_c
@pytest.mark.parametrize("draft", ["suffix", "mtp", "auto"])
def test_steps_of_several_rows_are_taped_unless_drafts_are_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 4, 5]]
    texts = []
    with SpecEngine(folder, draft=draft, dtype="float32", max_model_len=LONGEST) as engine:
        for plans in (False, True):
            monkeypatch.setattr(Policy, "plans_next", property(lambda _, plans=plans: plans))
            before = engine.stats().device_steps
            texts.append([done.token_ids for done in engine.generate(prompts, params)])
            assert (engine.stats().device_steps - before >= 10) != plans
        before = engine.stats().device_steps
        engine.generate(prompts, params.model_copy(update={"speculate": False}))
        assert engine.stats().device_steps - before >= 10, "no drafts can be planned for these"
        assert engine.model.loop.speculation.policy.mixed, "the host pads no rows"
    assert texts[0] == texts[1]
