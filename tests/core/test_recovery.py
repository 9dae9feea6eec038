"""A step that fails anywhere, at any stage, leaves no damage for later requests."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import Delta, SamplingParams, SpecEngine
from specdec.draft.history import NgramTable
from specdec.errors import EngineError, SpecdecError
from specdec.kernels.native.tape import Tape
from specdec.state_slots.prefix.tree import PrefixNode
from tests.draft.oracle import Oracle

PROMPTS = ([1, 2, 3, 1, 2, 3, 1, 2], [7, 8, 9, 7, 8, 9], [5] * 20)
PARAMS = [
    SamplingParams(max_tokens=16, temperature=0.8, seed=own, ignore_eos=own > 0)
    for own in range(len(PROMPTS))
]
TREES: Mapping[str, Any] = {"adaptive": False, "num_steps": 3, "topk": 2, "num_draft_tokens": 6}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "records": {"draft": "suffix", **TREES},
    "snapshots": {"draft": "suffix", "slots": "snapshot", "memory_bytes": "16MiB", **TREES},
    "on the device": {"draft": "suffix", "graphs": True, **TREES},
    "states of drafts": {"draft": "self-int4", "adaptive": False, "num_steps": 3},
    "tapes": {"draft": "none", "dtype": "float32", "graphs": False},
    "taped steps": {"draft": "none", "dtype": "float32"},
    "prefixes": {"draft": "suffix", "prefix_cache": True, **TREES},
    "prefixes on the device": {"draft": "suffix", "prefix_cache": True, "graphs": True, **TREES},
}
STEP = (
    "planned",
    "admitted in part",
    "inside the network",
    "learnt",
    "said in part",
    "ended",
    "inside the arena",
)
PLACES: Mapping[str, tuple[str, ...]] = {
    "records": (*STEP, "drafted", "inside a look-up", "chosen", "committed in part", "forgotten"),
    "snapshots": ("drafted", "committed in part", "inside the arena"),
    "on the device": (*STEP, "launched", "read", "handed back"),
    "taped steps": ("inside a tape", "launched", "read", "handed back"),
    "tapes": ("inside a tape", "chosen", "said in part"),
    "prefixes": (*STEP, "noted", "kept", "lent", "forgotten"),
    "prefixes on the device": ("noted", "kept", "read", "handed back"),
}


def place(engine: SpecEngine, name: str) -> tuple[Any, str, int]:
    """Return a function that a step calls, and which call should fail after doing its work."""
    loop = engine.model.loop
    match name:
        case "planned":
            return loop.scheduler, "schedule", 3
        case "admitted in part":
            return loop.arena, "take_state", 2
        case "drafted":
            return loop.speculation, "draft", 3
        case "inside a look-up":
            return NgramTable, "index", 7
        case "inside the network":
            return engine.model.network.blocks[1].mixing, "run", 2
        case "inside a tape":
            return Tape, "play", 3
        case "chosen":
            return loop, "_choose", 3
        case "committed in part":
            return loop.speculation.backing, "promote", 3
        case "learnt":
            return loop.speculation.acceptance, "learn", 4
        case "said in part":
            return loop, "_emit", 3
        case "ended":
            return loop.speculation, "end", 1
        case "forgotten":
            return loop.speculation.acceptance, "end", 1
        case "inside the arena":
            return loop.arena._blocks, "_file", 3
        case "noted":
            return loop.scheduler.cache, "note", 2
        case "kept":
            return loop.scheduler.cache, "keep", 1
        case "lent":
            return loop.scheduler.cache, "lend", 2
        case "launched":
            return loop.runner.batch, "launch", 2
        case "read":
            return loop.runner.batch, "read", 2
        case "handed back":
            return loop.runner.batch, "end", 1
    raise AssertionError(name)


def break_once(owner: Any, name: str, at: int, error: Exception, patch: pytest.MonkeyPatch) -> None:
    """Make the `at`-th call of a function raise after it has done its work."""
    right, calls = getattr(owner, name), 0

    def wrong(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = right(*arguments, **named)
        if calls == at:
            raise error
        return result

    patch.setattr(owner, name, wrong)


def watch_forgetting(engine: SpecEngine, patch: pytest.MonkeyPatch) -> list[list[PrefixNode]]:
    """Record the cached prefixes left after each recovery."""
    loop, left = engine.model.loop, list[list[PrefixNode]]()
    right, cache = loop.recover, loop.scheduler.cache

    def recover() -> None:
        right()
        left.append(list(cache.tree.nodes()) if cache else [])

    patch.setattr(loop, "recover", recover)
    return left


def ask(engine: SpecEngine) -> list[tuple[int, ...] | SpecdecError]:
    """Complete all prompts together; return each one's output or error."""
    inbox: queue.SimpleQueue[tuple[int, Delta | SpecdecError]] = queue.SimpleQueue()
    prepared = [engine.prepare(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    engine.submit(prepared, lambda *said: inbox.put(said))
    told: list[tuple[int, ...] | SpecdecError] = [()] * len(PROMPTS)
    left = len(PROMPTS)
    while left:
        index, item = inbox.get(timeout=60)
        before = told[index]
        assert isinstance(before, tuple), "nothing comes after an error"
        if isinstance(item, Delta):
            told[index] = (*before, *item.token_ids)
            left -= item.finish_reason is not None
        else:
            told[index] = item
            left -= 1
    return told


@pytest.fixture(scope="module")
def expected(hybrid: Path) -> list[tuple[int, ...]]:
    """Return each prompt's output alone."""
    with SpecEngine(hybrid, draft="none", prefix_cache=False, dtype="float64") as engine:
        return [
            engine.generate([prompt], params)[0].token_ids
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, hybrid: Path, expected: list[tuple[int, ...]]
) -> Iterator[SpecEngine]:
    """Open an engine whose drafts, if any, are partly accepted."""
    with SpecEngine(hybrid, **{"dtype": "float64", "max_running": 2, **WAYS[request.param]}) as engine:
        if speculation := engine.model.loop.speculation if engine.model.settings.drafters else None:
            texts = [(*prompt, *said) for prompt, said in zip(PROMPTS, expected, strict=True)]
            speculation.add_drafter(Oracle(texts, vocab=engine.model.network.spec.vocab))
        yield engine


def settled(engine: SpecEngine) -> None:
    """Wait until the engine is idle; check that no request left anything behind."""
    before = engine.stats().clean_checks
    until_s = time.monotonic() + 60
    engine._worker._put(lambda: None)
    while engine.stats().clean_checks == before:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    loop = engine.model.loop
    loop.check_idle()
    speculation = loop.speculation
    assert not (len(speculation.acceptance) or speculation._told or speculation._skips_draft)
    for drafter in speculation.drafters[:1]:
        assert not drafter._texts
    assert loop.runner is None or not loop.runner.batch.held
    engine.flush()  # prefixes cached by later requests
    usage = loop.arena.usage()
    assert usage.free_slabs == usage.slabs


@pytest.mark.parametrize(
    ("engine", "name"),
    [(way, name) for way, names in PLACES.items() for name in names],
    indirect=["engine"],
    scope="module",
)
def test_a_step_may_fail_anywhere(
    engine: SpecEngine,
    name: str,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = engine.stats().failed_steps
    errors = [ZeroDivisionError("by nought"), MemoryError(), torch.OutOfMemoryError("no room")]
    error = errors[len(name) % len(errors)]
    owner, function, at = place(engine, name)
    break_once(owner, function, at, error, monkeypatch)
    forgets = watch_forgetting(engine, monkeypatch)
    told = ask(engine)
    monkeypatch.undo()
    failed = [own for own in told if isinstance(own, SpecdecError)]
    assert failed and all(type(error).__name__ in str(own) for own in failed)
    assert all(own == alone for own, alone in zip(told, expected, strict=True) if isinstance(own, tuple))
    assert engine.stats().failed_steps == before + 1
    assert forgets == [[]], "no prefix outlives a step that failed"
    assert [record for record in caplog.records if record.exc_info and record.levelname == "ERROR"]
    settled(engine)
    assert ask(engine) == expected
    settled(engine)
    assert engine.stats().failed_steps == before + 1


def test_texts_that_are_complete_outlive_a_step_that_fails(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both requests end in one step, and caching their prefixes fails."""
    prompts, params = [[1, 2, 3], [4, 5, 6]], SamplingParams(max_tokens=6, ignore_eos=True, seed=7)
    with SpecEngine(hybrid, draft="none", dtype="float64") as engine:
        expected = [own.token_ids for own in engine.generate(prompts, params)]
        break_once(engine.model.loop.prefixes, "keep", 1, MemoryError(), monkeypatch)
        assert [own.token_ids for own in engine.generate(prompts, params)] == expected
        assert engine.stats().failed_steps == 1


@pytest.mark.parametrize("engine", ["records"], indirect=True, scope="module")
def test_whose_draft_is_not_trusted_is_forgotten_too(
    engine: SpecEngine, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails after a draft caused NaN, and before the request has decoded without drafts."""
    loop, right = engine.model.loop, engine.model.network.logits

    def logits(hidden_TD: Tensor) -> Tensor:
        drafted = len(hidden_TD) > len(loop.scheduler.running)
        return right(hidden_TD) * float("nan") if drafted else right(hidden_TD)

    monkeypatch.setattr(engine.model.network, "logits", logits)
    break_once(loop.speculation, "skip_draft_once", 1, MemoryError(), monkeypatch)
    assert any(isinstance(own, SpecdecError) for own in ask(engine))
    monkeypatch.undo()
    settled(engine)
    assert ask(engine) == expected


@pytest.mark.parametrize(
    "name", ["planned", "drafted", "chosen", "committed in part", "learnt", "said in part"]
)
def test_a_head_forgets_what_a_failed_step_has_left(
    checkpoint: Callable[..., Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of finished requests would never be used."""
    folder = checkpoint(mtp_num_hidden_layers=1)
    chain = {"adaptive": False, "num_steps": 3, "topk": 1}
    with SpecEngine(
        folder, dtype="float64", draft="mtp", max_running=2, max_model_len=128, **chain
    ) as engine:
        expected = ask(engine)
        break_once(*place(engine, name), MemoryError(), monkeypatch)
        assert any(isinstance(own, SpecdecError) for own in ask(engine))
        monkeypatch.undo()
        head = engine.model.loop.speculation.head
        assert head and not head._unread
        assert ask(engine) == expected


def test_what_cannot_be_put_right_ends_the_engine(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests get the error, and new ones are refused."""
    with SpecEngine(hybrid, draft="none", max_running=2) as engine:
        loop = engine.model.loop
        monkeypatch.setattr(loop, "recover", loop.check_idle)
        break_once(loop.arena._blocks, "_file", 3, ZeroDivisionError(), monkeypatch)
        told = ask(engine)
        assert all(isinstance(own, EngineError) for own in told)
        assert {"stopped" in str(own) for own in told} == {False, True}
        assert engine.fault and "stopped" in engine.fault
        with pytest.raises(EngineError, match="stopped"):
            engine.generate([[1]])


def test_what_nobody_holds_any_more_is_noticed(hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SpecEngine(hybrid, draft="none") as engine:
        engine.generate([[1]])
        engine.model.loop.arena.take_blocks("nobody", 2)
        engine.generate([[1]])
        settled(engine)
        assert engine.stats().failed_steps == 1 and "holds 2 blocks" in caplog.text


def test_a_step_that_hangs_can_be_given_up(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SpecEngine(hybrid, draft="none")
    goes_on, plan = threading.Event(), engine.model.loop.scheduler.schedule

    def hang() -> Any:
        goes_on.wait()
        return plan()

    monkeypatch.setattr(engine.model.loop.scheduler, "schedule", hang)
    told: list[Any] = []
    asked = threading.Thread(target=lambda: told.extend(ask(engine)))
    assert engine.step_seconds == 0
    asked.start()
    while engine.step_seconds == 0:
        time.sleep(0.001)
    engine.abandon("It hangs.")
    asked.join(timeout=60)
    assert [str(own) for own in told] == ["It hangs."] * len(PROMPTS)
    with pytest.raises(EngineError, match="hangs"):
        engine.generate([[1]])
    assert not engine.close(0.01), "its thread is still in the step"
    goes_on.set()
    assert engine.close()
