"""A prompt prefilled by another engine gives the text and the drafts of a single engine."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec import Completion, SamplingParams, SpecEngine
from specdec.config.tenant import SOLE, Tenant
from specdec.core.fairness import FairQueue
from specdec.core.scheduler import Scheduler, StepPlan
from specdec.engine.incoming import IncomingPrefix
from specdec.engine.kv_transfer import KVTransfer, LentPrefix
from specdec.errors import ConfigError, EngineError
from specdec.setup.capabilities import AXES, RULES
from specdec.setup.drafters import DRAFTERS, NO_HEAD
from specdec.state_slots.arena import Arena
from specdec.state_slots.prefix.cache import PrefixCache
from tests.lossless.cases import SHAPES, memory_for
from tests.lossless.covering import covering
from tests.lossless.handover import Copy, transfer_prefix
from tests.lossless.test_prefix_texts import grove
from tests.models.representatives import REPRESENTATIVES
from tests.selection import EXHAUSTIVE, only

SETTINGS: Mapping[str, Any] = {"dtype": "float64", "max_model_len": 224, "chunk_tokens": 24, "max_running": 4}
WAYS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
    {"temperature": 1.2, "seed": 3, "n": 2, "presence_penalty": 0.7},
)
PROMPTS = [prompt for prompt in grove(5, 30) if len(prompt) > 70][:8]
PARAMS = [SamplingParams(max_tokens=32, trees=True, **own) for own in WAYS * 2]
FAMILIES = ("qwen3_5", "qwen3", "nemotron_h")
ALL = [
    (family, drafter, shape, backing, steps)
    for family, drafter, shape, backing, steps in itertools.product(
        FAMILIES, AXES["drafter"], SHAPES, AXES["backing"], AXES["steps"]
    )
    if ({"drafter": drafter, "family": family}, NO_HEAD) not in RULES
    and not (steps == "device" and drafter in DRAFTERS and DRAFTERS[drafter].host_only)
    and not (drafter in ("self-int4", "block") and shape == "tree")
    and not (drafter == "none" and shape == "tree")
]
CELLS = covering(ALL)
"""A pairwise covering."""
OTHERS = [
    (family, "suffix", "tree", "record", "host") for family in REPRESENTATIVES if family not in FAMILIES
]


def fields_of(drafter: str, shape: str, backing: str, steps: str) -> dict[str, Any]:
    own = {"adaptive": False, **SHAPES[shape]} if drafter != "none" else {}
    return {"draft": drafter, "slots": backing, "graphs": steps == "device", **own, **SETTINGS}


@contextmanager
def engines(folder: Path, count: int, fields: Mapping[str, Any]) -> Iterator[list[SpecEngine]]:
    opened: list[SpecEngine] = []
    try:
        for _ in range(count):
            opened.append(SpecEngine(folder, **fields))
        yield opened
    finally:
        for engine in opened:
            engine.close()


def by_one(engine: SpecEngine) -> list[list[Completion]]:
    """Run all prompts on one engine, flushing the prefix cache in between."""
    said = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        said.append(engine.generate([prompt], [params]))
        engine.flush()
    return said


def by_two(reader: SpecEngine, writer: SpecEngine, **spoilt: Any) -> list[list[Completion]]:
    said = []
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        assert transfer_prefix(reader, writer, prompt, overlapped=bool(i % 2), **spoilt)
        said.append(writer.generate([prompt], [params]))
        # A head prefills the last token again without a state.
        assert said[-1][0].stats.cached_tokens >= len(prompt) - 2
        writer.flush()
        if i % 3 == 0:
            reader.flush()
    return said


def texts(said: Sequence[Sequence[Completion]]) -> list[list[tuple[Any, ...]]]:
    return [[(choice.token_ids, choice.text, choice.finish_reason) for choice in choices] for choices in said]


def drafts(said: Sequence[Sequence[Completion]]) -> list[list[Any]]:
    return [[choice.drafts for choice in choices] for choices in said]


def lengths(said: Sequence[Sequence[Completion]]) -> float:
    return sum(choice.stats.acceptance_length for choices in said for choice in choices)


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("family", "drafter", "shape", "backing", "steps"),
    only(lambda cell: cell[0] == "qwen3_5", CELLS + OTHERS),
)
def test_texts_and_drafts_equal_one_engine(
    family_folder: Callable[..., Path], family: str, drafter: str, shape: str, backing: str, steps: str
) -> None:
    fields = fields_of(drafter, shape, backing, steps)
    with engines(family_folder(family), 3, fields) as (reader, writer, one):
        alone, found = by_one(one), by_two(reader, writer)
        assert texts(found) == texts(alone)
        if drafter != "auto":  # auto's choice depends on time
            assert drafts(found) == drafts(alone)
            assert lengths(found) == lengths(alone)
        for engine in (reader, writer):
            engine.flush()
            engine.generate([1], SamplingParams(max_tokens=1))
            engine.flush()
            usage = engine.transfers.arena.usage()
            assert engine.stats().failed_steps == 0 and usage.free_slabs == usage.slabs


def without_the_heads_keys(
    _: SpecEngine, lent: LentPrefix, writer: SpecEngine, landing: IncomingPrefix
) -> None:
    """Omit the head's KV: zeros in its layer, the last one."""
    arena = writer.transfers.arena
    blocks = torch.tensor(landing.blocks)
    arena.pages(len(arena.layout.kv) - 1)[blocks] = 0


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_a_head_whose_keys_stay_behind_is_cold(family_folder: Callable[..., Path], family: str) -> None:
    """A mutant that changes drafts but no text, as the target decides texts."""
    with engines(family_folder(family), 3, fields_of("mtp", "chain", "record", "host")) as (
        reader,
        writer,
        one,
    ):
        alone = by_one(one)
        cold = by_two(reader, writer, copied=without_the_heads_keys)
        assert texts(cold) == texts(alone)
        assert drafts(cold) != drafts(alone)


def without_the_state(_: SpecEngine, lent: LentPrefix, writer: SpecEngine, landing: IncomingPrefix) -> None:
    assert landing.state is not None
    writer.transfers.arena.state_bytes_X(landing.state).zero_()


def without_the_blocks(_: SpecEngine, lent: LentPrefix, writer: SpecEngine, landing: IncomingPrefix) -> None:
    for block in landing.blocks:
        writer.transfers.arena.block_bytes_X(block).zero_()


@EXHAUSTIVE
@pytest.mark.parametrize("spoil", [without_the_state, without_the_blocks])
def test_other_bytes_give_another_text(family_folder: Callable[..., Path], spoil: Copy) -> None:
    with engines(family_folder("qwen3_5"), 3, fields_of("mtp", "tree", "record", "host")) as (
        reader,
        writer,
        one,
    ):
        assert texts(by_two(reader, writer, copied=spoil)) != texts(by_one(one))


def test_a_cached_prompt_is_not_fetched(folder: Path) -> None:
    with engines(folder, 2, fields_of("mtp", "tree", "record", "host")) as (reader, writer):
        assert transfer_prefix(reader, writer, PROMPTS[0])
        assert not transfer_prefix(reader, writer, PROMPTS[0])
        assert not transfer_prefix(reader, writer, PROMPTS[0][:40])  # too short


def test_a_partially_cached_prefix_is_not_copied_again(folder: Path) -> None:
    long = [*PROMPTS[0][:48], *PROMPTS[1][:70]]
    with engines(folder, 3, fields_of("mtp", "tree", "record", "host")) as (reader, writer, one):
        want = one.generate([long], PARAMS[1])
        writer.generate([PROMPTS[0][:56]], SamplingParams(max_tokens=1))
        came: list[tuple[int, int]] = []

        def note(_: SpecEngine, lent: LentPrefix, writer: SpecEngine, landing: IncomingPrefix) -> None:
            came.append((landing.num_cached, len(landing.blocks)))

        assert transfer_prefix(reader, writer, long, copied=note)
        assert came == [(48, 5)]
        assert texts([writer.generate([long], PARAMS[1])]) == texts([want])


def test_a_reader_that_preempts_lends_the_same(folder: Path) -> None:
    """Its memory holds one and a half prompts; the rest is preempted and prefilled again."""
    fields = fields_of("mtp", "tree", "record", "host")
    with engines(folder, 1, fields) as (one,):
        alone, layout = by_one(one), one.model.settings.layout
    memory = memory_for(layout, sequences=3, blocks=24)
    with (
        engines(folder, 1, fields) as (writer,),
        engines(folder, 1, {**fields, "memory_bytes": memory}) as (reader,),
    ):
        preempt_readers(reader)
        assert texts(by_two(reader, writer)) == texts(alone)
        assert reader.stats().preemptions >= len(PROMPTS) - 2, (
            "all but the first and one that hits its prefix"
        )


def test_a_preempted_prompt_does_not_wait_for_its_own_loan(folder: Path) -> None:
    """Its memory holds one prompt: blocks that it has lent must not block its own new prefill."""
    fields = fields_of("none", "chain", "record", "host")
    with engines(folder, 1, fields) as (one,):
        layout = one.model.settings.layout
    length = len(PROMPTS[0]) + 1
    memory = memory_for(layout, sequences=1, blocks=layout.blocks_for(length))
    with engines(folder, 1, {**fields, "memory_bytes": memory, "max_model_len": length}) as (engine,):
        preempt_readers(engine, after=64)
        ready: list[int] = []
        prepared = engine.prepare(PROMPTS[0], SamplingParams(max_tokens=1))
        loan = engine.transfers.lend(prepared, lambda lent: ready.append(lent.ready))
        lent = loan.done.result(60)
        assert engine.stats().preemptions == 1
        assert ready[-1] == len(PROMPTS[0]) - 1 and sorted(ready) != ready
        assert lent.intact and len(lent.blocks) == layout.blocks_for(lent.length)
        loan.give_back()


def preempt_readers(engine: SpecEngine, after: int = 1) -> None:
    """Preempt each request once, after it has prefilled `after` tokens."""
    scheduler = engine.model.loop.scheduler
    schedule = scheduler.schedule

    def preempt_and_schedule() -> StepPlan:
        for request in reversed(scheduler.running):
            if request.preemptions == 0 and request.num_computed_tokens >= after:
                scheduler.preempt(request)
        return schedule()

    scheduler.schedule = preempt_and_schedule  # type: ignore[method-assign]


def test_lent_blocks_survive_eviction(folder: Path) -> None:
    """Lent blocks survive compaction and eviction; only a failure revokes them, and marks the loan."""
    fields = fields_of("none", "chain", "record", "host")
    with engines(folder, 1, fields) as (one,):
        layout = one.model.settings.layout
    memory = memory_for(layout, sequences=4, blocks=40)
    with engines(folder, 1, {**fields, "memory_bytes": memory}) as (engine,):
        loan = engine.transfers.lend(engine.prepare(PROMPTS[0], SamplingParams(max_tokens=1)))
        lent = loan.done.result(60)
        assert lent.state is not None
        arena = engine.transfers.arena
        views = [arena.state_bytes_X(lent.state), *map(arena.block_bytes_X, lent.blocks)]
        before = [view.clone() for view in views]
        for _ in range(2):
            engine.generate([*PROMPTS], SamplingParams(max_tokens=40, ignore_eos=True, seed=1))
            engine.flush()
        assert all(torch.equal(view, kept) for view, kept in zip(views, before, strict=True))
        assert lent.intact
        for _ in range(2):
            loan.give_back()
        engine.generate([PROMPTS[1]], SamplingParams(max_tokens=1))
        assert not lent.intact
        engine.flush()
        assert arena.usage().free_slabs == arena.usage().slabs


def test_a_failed_step_revokes_loans_and_keeps_landings(folder: Path) -> None:
    """Another process may still write into a landing: its memory must not be reused."""
    fields = fields_of("none", "chain", "record", "host")
    with engines(folder, 1, fields) as (engine,):
        loan = engine.transfers.lend(engine.prepare(PROMPTS[0], SamplingParams(max_tokens=1)))
        lent = loan.done.result(60)
        landing = engine.transfers.begin_landing(PROMPTS[1][:-1], Tenant(salt="other")).result(60)
        assert landing and lent.intact
        want = engine.generate([PROMPTS[2]], PARAMS[0])
        fail_once(engine)
        with pytest.raises(EngineError, match="on purpose"):
            engine.generate([PROMPTS[2]], PARAMS[0])
        assert not lent.intact
        arena = engine.transfers.arena
        own = [arena.state_bytes_X(landing.state or 0), *map(arena.block_bytes_X, landing.blocks)]
        for view in own:
            view.fill_(0xFF)
        assert texts([engine.generate([PROMPTS[2]], PARAMS[0])]) == texts([want])
        assert all(bool((view == 0xFF).all()) for view in own), "nothing else was given that memory"
        assert not engine.transfers.land(landing, None).result(60)
        loan.give_back()
        engine.flush()
        assert arena.usage().free_slabs == arena.usage().slabs


def fail_once(engine: SpecEngine) -> None:
    loop = engine.model.loop
    choose = loop._choose

    def fail(*_: Any) -> Any:
        loop._choose = choose  # type: ignore[method-assign]
        raise RuntimeError("on purpose")

    loop._choose = fail  # type: ignore[method-assign]


def test_a_prompt_with_nan_is_not_lent(folder: Path) -> None:
    fields = fields_of("none", "chain", "record", "host")
    with engines(folder, 1, fields) as (engine,):
        norm_D = engine.model.network.norm_D
        kept = norm_D.clone()
        norm_D.fill_(float("nan"))
        loan = engine.transfers.lend(engine.prepare(PROMPTS[0], SamplingParams(max_tokens=1)))
        with pytest.raises(EngineError, match="NaN"):
            loan.done.result(60)
        norm_D.copy_(kept)
        engine.generate([PROMPTS[0]], PARAMS[0])
        assert engine.stats().prefixes and engine.stats().prefixes.hit == 0


def test_a_loan_that_is_given_back_early_is_not_read_on(folder: Path) -> None:
    fields = fields_of("none", "chain", "record", "host")
    with engines(folder, 1, fields) as (engine,):
        loan = engine.transfers.lend(engine.prepare(PROMPTS[0], SamplingParams(max_tokens=1)))
        loan.give_back()
        with pytest.raises(EngineError):
            loan.done.result(60)
        landing = engine.transfers.begin_landing(PROMPTS[1][:-1], Tenant(salt="other"))
        assert landing.result(60)
        engine.transfers.drop(landing.result()).result(60)
        engine.flush()
        assert engine.transfers.arena.usage().free_slabs == engine.transfers.arena.usage().slabs


def test_landing_memory_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detects a mutant: zeroing a landing's state after the transfer has written it."""
    fields = fields_of("none", "chain", "record", "host")

    def is_untouched() -> bool:
        with engines(folder, 1, fields) as (engine,):
            arena = engine.transfers.arena
            arena.data.fill_(0xFF)
            landing = engine.transfers.begin_landing(PROMPTS[0][:-1], SOLE).result(60)
            assert landing and landing.state is not None
            views = [arena.state_bytes_X(landing.state), *map(arena.block_bytes_X, landing.blocks)]
            untouched = all(bool((view == 0xFF).all()) for view in views)
            engine.transfers.drop(landing).result(60)
        return untouched

    assert is_untouched()

    def zeroed(arena: Arena, owner: Any, n: int) -> list[int]:
        state = arena.take_state(owner)
        assert state is not None and n == 1
        return [state]

    monkeypatch.setattr(Arena, "take_snapshots", zeroed)
    assert not is_untouched()


def test_a_landing_waits_for_memory_and_can_be_given_up(folder: Path) -> None:
    fields = fields_of("none", "chain", "record", "host")
    with engines(folder, 1, fields) as (one,):
        layout = one.model.settings.layout
    memory = memory_for(layout, sequences=2, blocks=14)
    with engines(folder, 1, {**fields, "memory_bytes": memory}) as (engine,):
        first = engine.transfers.begin_landing(PROMPTS[0][:-1], SOLE).result(60)
        assert first
        second = engine.transfers.begin_landing(PROMPTS[1][:-1], Tenant(salt="other"))
        third = engine.transfers.begin_landing(PROMPTS[2][:-1], SOLE)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        assert second.cancel()
        engine.transfers.drop(first).result(60)
        took = third.result(60)
        assert took
        engine.transfers.drop(took).result(60)


def test_no_landing_waits_for_an_engine_that_ends(folder: Path) -> None:
    """A landing that begins while the thread is ending misses the shutdown notice."""
    with engines(folder, 1, fields_of("none", "chain", "record", "host")) as (engine,):
        engine.model.loop.close()
        assert engine.transfers.begin_landing(PROMPTS[0][:-1], SOLE).result(60) is None


def test_no_landing_waits_for_an_engine_that_hangs(folder: Path) -> None:
    hangs, go_on = Event(), Event()

    def hang(_: PrefixCache) -> bool:
        hangs.set()
        return go_on.wait(60)

    with engines(folder, 1, fields_of("none", "chain", "record", "host")) as (engine,):
        hanging = engine.transfers.look(hang)
        assert hangs.wait(60)
        loan = engine.transfers.lend(engine.prepare(PROMPTS[1], SamplingParams(max_tokens=1)))
        found = engine.transfers.begin_landing(PROMPTS[0][:-1], Tenant(salt="other"))
        engine.abandon("it hangs")
        with pytest.raises(EngineError, match="hangs"):
            found.result(60)
        with pytest.raises(EngineError, match="hangs"):
            loan.done.result(60)
        loan.give_back()
        go_on.set()
        assert hanging.result(60)


def test_requests_wait_for_lent_memory_and_are_not_refused(folder: Path) -> None:
    """The engine sleeps meanwhile: a message wakes it when the lent memory is returned."""
    fields = fields_of("none", "chain", "record", "host")
    with engines(folder, 1, fields) as (one,):
        layout = one.model.settings.layout
        want = one.generate([PROMPTS[1]], PARAMS[0])
    length = max(map(len, PROMPTS[:2])) + 34
    memory = memory_for(layout, sequences=1, blocks=layout.blocks_for(length))
    with engines(folder, 1, {**fields, "memory_bytes": memory, "max_model_len": length}) as (engine,):
        loan = engine.transfers.lend(engine.prepare(PROMPTS[0], SamplingParams(max_tokens=1)))
        loan.done.result(60)
        said: Future[list[Completion]] = Future()
        asking = Thread(target=lambda: said.set_result(engine.generate([PROMPTS[1]], PARAMS[0])))
        asking.start()
        with pytest.raises(TimeoutError):
            said.result(0.5)
        assert not engine.model.core.has_work and engine.stats().waiting == 1
        loan.give_back()
        assert texts([said.result(60)]) == texts([want])
        asking.join()


def test_no_more_land_than_can_run(folder: Path) -> None:
    """A landing whose request has to wait might be evicted, and its transfer wasted."""
    with engines(folder, 1, fields_of("none", "chain", "record", "host")) as (engine,):
        begun = [engine.transfers.begin_landing(own[:-1], SOLE) for own in PROMPTS[:6]]
        landed = [own.result(60) for own in begun[:4]]
        with pytest.raises(TimeoutError):
            begun[4].result(0.2)
        for own, wait in zip(landed, [*begun[4:], None, None], strict=True):
            assert own
            engine.transfers.drop(own).result(60)
            if wait:
                landing = wait.result(60)
                assert landing
                engine.transfers.drop(landing).result(60)


def test_a_landing_starts_when_the_last_request_ends(folder: Path) -> None:
    """It waited behind that request, and no other message would wake the engine."""
    with engines(folder, 1, {**fields_of("none", "chain", "record", "host"), "max_running": 1}) as (engine,):
        holds, go_on = Event(), Event()

        def hold(_: PrefixCache) -> bool:
            holds.set()
            return go_on.wait(60)

        holding = engine.transfers.look(hold)
        assert holds.wait(60)
        asking = Thread(target=lambda: engine.generate([PROMPTS[1]], PARAMS[0]))
        asking.start()
        while engine.transfers._worker._inbox.empty():
            time.sleep(0.005)
        found = engine.transfers.begin_landing(PROMPTS[0][:-1], Tenant(salt="other"))
        go_on.set()
        assert holding.result(60)
        asking.join()
        landing = found.result(60)
        assert landing
        engine.transfers.drop(landing).result(60)


@pytest.mark.parametrize(("arrived_s", "count", "begins"), [(-1.0, 1, False), (float("inf"), 8, True)])
def test_landings_and_requests_have_memory_in_the_order_of_their_coming(
    folder: Path, arrived_s: float, count: int, begins: bool
) -> None:
    """Otherwise either kind could starve the other."""
    with engines(folder, 1, fields_of("none", "chain", "record", "host")) as (engine,):
        connector = engine.model.loop.scheduler.connector
        assert isinstance(connector, KVTransfer)
        landings = connector.landings
        waiting: Any = FairQueue()
        for _ in range(count):
            waiting.append(SimpleNamespace(arrived_s=arrived_s, tenant=SOLE))
        busy: Any = SimpleNamespace(max_running=4, running=[], waiting=waiting, rank=waiting.rank)
        busy.comes_before_waiting = partial(Scheduler.comes_before_waiting, busy)
        scheduler = landings.requests

        def wait_behind(requests: Any) -> None:
            """Runs in the engine's thread, which must not be using `requests` meanwhile."""
            landings.requests = requests
            landings.advance()

        engine.transfers.look(lambda _: wait_behind(busy)).result(60)
        found = engine.transfers.begin_landing(PROMPTS[0][:-1], Tenant(salt="other"))
        engine.transfers.look(lambda _: None).result(60)
        assert found.done() == begins
        engine.transfers.look(lambda _: wait_behind(scheduler)).result(60)
        landing = found.result(60)
        assert landing
        engine.transfers.drop(landing).result(60)


def test_an_engine_that_others_write_into_does_not_rest(folder: Path) -> None:
    with engines(folder, 1, fields_of("none", "chain", "record", "host")) as (engine,):
        loan = engine.transfers.lend(engine.prepare(PROMPTS[0], SamplingParams(max_tokens=1)))
        lent = loan.done.result(60)
        landing = engine.transfers.begin_landing(PROMPTS[1][:-1], Tenant(salt="other")).result(60)
        assert landing
        with pytest.raises(EngineError, match="fetched"):
            engine.rest()
        engine.transfers.drop(landing).result(60)
        assert lent.intact
        engine.rest()
        assert not lent.intact
        engine.wake()


def test_without_a_cache_nothing_is_lent(folder: Path) -> None:
    with (
        engines(folder, 1, {**fields_of("none", "chain", "record", "host"), "prefix_cache": False}) as (
            engine,
        ),
        pytest.raises(ConfigError, match="prefix_cache"),
    ):
        engine.transfers.lend(engine.prepare([1, 2], SamplingParams(max_tokens=1)))
