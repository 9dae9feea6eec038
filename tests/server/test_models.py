"""Several models in one process take turns on the memory, and no request's output changes."""

import asyncio
import gc
import itertools
import json
import random
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import EngineConfig, SamplingParams, SpecEngine
from specdec.cli import main
from specdec.core.batch import StepReport
from specdec.errors import CapacityError, CheckpointError, ConfigError, EngineError
from specdec.models.folder import SHIPPED
from specdec.server import resident as resident_module
from specdec.server import shares
from specdec.server.answers import Answers, RequestDeadline, StreamWaker
from specdec.server.failures import Failure
from specdec.server.resident import ModelStatus, Phase, Resident
from specdec.server.settings import ServerConfig
from specdec.server.shares import open_models
from specdec.server.switcher import Switcher
from specdec.state_slots.arena import Arena
from tests.selection import EXHAUSTIVE
from tests.server.faulty import FILE
from tests.server.live import Live, total
from tests.server.test_guards import open_stream, wait_for

NAMES = ("anna", "berta", "clara")
ARENA = 24 << 20
DRAFTS: dict[str, Any] = {"draft": "suffix", "adaptive": False, "num_steps": 3}
"""Nothing is timed before the first request, as each test loads three models."""
CONFIG = EngineConfig(dtype="float32", memory_bytes=ARENA, max_running=4, max_model_len=512, **DRAFTS)
PROMPTS = ("def fib(n):\n", "import os\n\nclass Reader:\n", "for i in range(")
LONG = SamplingParams(max_tokens=72, temperature=0.8, seed=5, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return copies of the shipped model under different names."""
    where = tmp_path_factory.mktemp("models")
    leave = shutil.ignore_patterns("eagle3", "*.svg", "README.md")
    return [str(shutil.copytree(SHIPPED["tiny"], where / name, ignore=leave)) for name in NAMES]


@pytest.fixture(scope="module")
def plain(folders: list[str]) -> list[list[int]]:
    """Return the texts of a model in its own engine."""
    with SpecEngine(folders[0], CONFIG) as engine:
        return [list(done.token_ids) for done in engine.generate(PROMPTS, LONG)]


@contextmanager
def opened(folders: Sequence[str], **own: Any) -> Iterator[Switcher]:
    """Load models as a server does, and check at the end that each arena is intact."""
    switcher = open_models(folders, CONFIG, ServerConfig(**own))
    try:
        switcher.start()
        yield switcher
        for resident in switcher.residents:
            if resident.engine:
                resident.engine.model.loop.arena.check_integrity()
    finally:
        switcher.close()


@asynccontextmanager
async def switching(switcher: Switcher) -> AsyncIterator[None]:
    task = asyncio.create_task(switcher.run(lambda _: 1.0))
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def ask(
    own: Resident,
    prompt: str = PROMPTS[0],
    params: SamplingParams = SHORT,
    keep: float | None = None,
    slow_s: float = 0.0,
    caller: str = "",
) -> tuple[list[int], int]:
    """Act like the server's handlers; return a text's tokens, and its preemptions."""
    own.enter(keep, caller)
    try:
        engine, bell, until = (
            await own.ready(),
            StreamWaker(asyncio.get_running_loop()),
            RequestDeadline(60.0),
        )
        prepared = [engine.prepare(prompt, params)]
        answers = Answers(engine, bell, prepared, streams=True, deadline=until, on_over=own.note_over)
        with own.answering(answers), answers:
            deltas = [said.delta async for said in answers]
            await asyncio.sleep(slow_s)
    finally:
        own.leave(keep, caller)
    assert deltas[-1].stats
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].stats.preemptions


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


async def iterate(times: int) -> None:
    """Run the event loop for a number of iterations."""
    for _ in range(times):
        await asyncio.sleep(0)


def run(switcher: Switcher, work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with switching(switcher):
            await work()

    asyncio.run(main())


def watched(switcher: Switcher, most: int) -> list[int]:
    """Record at each step how many arenas hold anything."""
    held: list[int] = []

    def observe(_: StepReport) -> None:
        engines = [resident.engine for resident in switcher.residents if resident.engine]
        held.append(sum(engine.model.loop.arena.held > 0 for engine in engines))

    for own in switcher.residents:
        assert own.engine
        own.engine.model.loop.observers.append(observe)
    return held


@EXHAUSTIVE
@pytest.mark.parametrize("arenas", [1, 2])
def test_a_burst_over_three_loses_nothing(folders: list[str], plain: list[list[int]], arenas: int) -> None:
    """Turns are so short that answers are preempted in the middle, several times."""
    with opened(folders, switch_after=0.01, arenas=arenas) as switcher:
        assert [resident.status for resident in switcher.residents].count(ModelStatus.WARM) == arenas
        engines = [resident.engine for resident in switcher.residents]
        size = ARENA // arenas
        assert all(engine and engine.model.settings.memory_bytes == size for engine in engines)
        held = watched(switcher, arenas)
        answers: list[tuple[list[int], int]] = []

        async def burst() -> None:
            asked = [ask(resident, prompt, LONG) for prompt in PROMPTS for resident in switcher.residents]
            answers.extend(await asyncio.gather(*asked))

        run(switcher, burst)
        assert [tokens for tokens, _ in answers] == [text for text in plain for _ in NAMES]
        assert sum(preemptions for _, preemptions in answers) >= 3
        assert held and max(held) <= arenas
        for own in switcher.residents:
            assert own.engine and own.switches["wake"] >= 1 and not own.switches["load"]
            if own.phase is Phase.RESTING:
                assert not own.engine.model.loop.arena.data.any()


@pytest.mark.parametrize("iterations", range(6))
def test_a_switcher_that_is_cancelled_as_something_changes_ends(iterations: int) -> None:
    """With any number of event loop iterations between the change and the cancellation."""

    class Waits(Switcher):
        def _advance(self, _: asyncio.TaskGroup) -> float:
            return 60.0

    async def cancel() -> None:
        switcher = Waits([])
        task = asyncio.create_task(switcher.run(lambda _: 1.0))
        await iterate(10)
        switcher.changed.set()
        await iterate(iterations)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled(), "the cancellation was lost"

    asyncio.run(cancel())


ALLOWED = """
UNLOADED: LOADING
LOADING: WARM RESTING UNLOADED
WARM: YIELDING FLUSHING DROPPING
YIELDING: RESTING WARM
RESTING: NEXT WAKING FLUSHING DROPPING
NEXT: WAKING RESTING
WAKING: WARM
FLUSHING: UNLOADING WARM RESTING
UNLOADING: UNLOADED
DROPPING: STUCK UNLOADED
STUCK: DROPPING
"""
PATHS = {
    "LOADING WARM YIELDING RESTING NEXT WAKING WARM FLUSHING UNLOADING UNLOADED": "0110011110",
    "LOADING RESTING FLUSHING RESTING DROPPING STUCK DROPPING UNLOADED": "00000000",
    "LOADING WARM FLUSHING WARM DROPPING STUCK DROPPING UNLOADED": "01111110",
    "LOADING RESTING WAKING WARM YIELDING WARM": "001111",
}
"""Sequences of phases, and whether the model holds an arena in each."""


def test_a_model_enters_only_phases_that_may_follow() -> None:
    allowed = {
        (Phase[before], Phase[after])
        for before, afters in (line.split(": ") for line in ALLOWED.strip().splitlines())
        for after in afters.split()
    }
    for before, after in itertools.product(Phase, Phase):
        model = Resident(Path("x"), ["x"], EngineConfig())
        model.phase = before
        if (before, after) in allowed:
            model.move(after)
            assert model.phase is after
        else:
            with pytest.raises(AssertionError, match=f"{before} -> {after}"):
                model.move(after)
            assert model.phase is before


@pytest.mark.parametrize("path", PATHS)
def test_each_phase_counts_the_arena_that_the_model_holds(path: str) -> None:
    model, held = Resident(Path("x"), ["x"], EngineConfig()), []
    assert not (model.holds_arena or model.holds_weights or model.is_changing)
    for name in path.split():
        model.move(Phase[name])
        held.append(model.holds_arena)
        assert model.holds_weights == (name != "UNLOADED")
        assert model.is_changing == (name not in ("UNLOADED", "WARM", "RESTING"))
    assert "".join(str(int(own)) for own in held) == PATHS[path]


class Asked:
    """A model that always has a waiting request of one caller."""

    engine, is_warm = None, False

    def __init__(self, name: str, caller: str, wanted_s: float) -> None:
        self.name, self.callers, self.wanted_s = name, Counter([caller]), wanted_s
        self.gate = SimpleNamespace(running=1)

    async def wake(self) -> None:
        self.wanted_s += 100.0


@pytest.mark.parametrize(
    ("caller", "turns"),
    [("alice", "berta anna clara anna berta anna"), ("bob", "berta clara anna berta clara anna")],
)
def test_callers_take_turns_regardless_of_their_number_of_models(caller: str, turns: str) -> None:
    """Bob asks for two models. If the third is asked for by him too, all three take turns."""
    switcher: Any = Switcher([])
    waiting = [Asked("anna", caller, 3.0), Asked("berta", "bob", 1.0), Asked("clara", "bob", 2.0)]
    for name in turns.split():
        own = min(waiting, key=switcher._order)
        assert own.name == name
        asyncio.run(switcher._wake(own))


def test_turn_lengths_follow_the_keys_weights() -> None:
    """A model has the largest weight of its callers; idle models are ignored."""
    weights = {"alice": 3.0, "bob": 1.0, "carol": 0.5}
    switcher: Any = Switcher([], switch_after_s=2.0)

    async def begin() -> None:
        task = asyncio.create_task(switcher.run(weights.__getitem__))
        await iterate(2)
        task.cancel()

    waiting = [Asked("anna", "alice", 1.0), Asked("berta", "bob", 2.0), Asked("clara", "carol", 3.0)]
    switcher.residents, idle = tuple(waiting), waiting[2].gate
    assert [switcher._turn_length(own) for own in waiting] == [2.0, 2.0, 2.0], "without weights"
    switcher.residents = ()
    asyncio.run(begin())
    switcher.residents = tuple(waiting)
    assert [switcher._turn_length(own) for own in waiting] == pytest.approx([4.0, 4 / 3, 2 / 3])
    idle.running = 0
    assert [switcher._turn_length(own) for own in waiting[:2]] == [3.0, 1.0]
    waiting[1].callers["alice"] += 1
    assert [switcher._turn_length(own) for own in waiting[:2]] == [2.0, 2.0]


@EXHAUSTIVE
def test_weights_that_do_not_all_fit_are_unloaded_when_their_requests_have_ended(
    folders: list[str], plain: list[list[int]]
) -> None:
    weight_bytes = open_models(folders, CONFIG, ServerConfig()).residents[0].weight_bytes
    assert weight_bytes > 1 << 20
    with opened(folders, switch_after=0.01, weights_bytes=2 * weight_bytes + 1) as switcher:
        statuses = [resident.status for resident in switcher.residents]
        assert statuses == [ModelStatus.WARM, ModelStatus.RESTING, ModelStatus.UNLOADED]
        most = 0

        async def burst() -> None:
            nonlocal most
            asked = [ask(resident, prompt, LONG) for prompt in PROMPTS for resident in switcher.residents]
            answers = asyncio.gather(*asked)
            while not answers.done():
                most = max(most, sum(resident.engine is not None for resident in switcher.residents))
                await asyncio.sleep(0.002)
            assert [tokens for tokens, _ in await answers] == [text for text in plain for _ in NAMES]

        run(switcher, burst)
        assert most == 2 and switcher.residents[2].switches["load"] == 1


def test_requests_that_leave_while_models_switch_hold_nothing_up(
    folders: list[str], plain: list[list[int]]
) -> None:
    """Those that stay get their whole texts, and nothing is left of those that leave at random times."""
    moments, brief = random.Random(7), LONG.model_copy(update={"max_tokens": 24})
    weight_bytes = open_models(folders, CONFIG, ServerConfig()).residents[0].weight_bytes
    with opened(folders, switch_after=0.03, weights_bytes=2 * weight_bytes + 1) as switcher:
        left = 0

        async def leaving(own: Resident, prompt: str) -> None:
            nonlocal left
            try:
                async with asyncio.timeout(0.5 * moments.random() ** 2):
                    await ask(own, prompt, brief)
            except TimeoutError:
                left += 1

        async def burst() -> None:
            pairs = [(resident, prompt) for prompt in PROMPTS[:2] for resident in switcher.residents]
            leave = asyncio.gather(*(leaving(*pair) for pair in pairs * 2))
            answers = await asyncio.gather(*(ask(*pair, brief) for pair in pairs))
            assert [tokens for tokens, _ in answers] == [text[:24] for text in plain[:2] for _ in NAMES]
            await leave
            for own in switcher.residents:
                await until(lambda own=own: not (own.is_changing or own.is_draining))
                gate = own.gate
                assert (gate.users, gate.waiting, gate.inside, gate.running) == (0, 0, 0, 0)
                assert own.wanted_s is None and not own.callers
                if engine := own.engine:
                    stats = engine.stats
                    await until(lambda stats=stats: stats().running + stats().waiting == 0)

        run(switcher, burst)
        assert left and switcher.residents[2].switches["load"] >= 1


@EXHAUSTIVE
def test_a_model_stays_loaded_for_its_keep_alive(folders: list[str]) -> None:
    with opened(folders[:1], keep_alive=-1) as switcher:
        (own,) = switcher.residents

        async def turns() -> None:
            first, _ = await ask(own)
            await asyncio.sleep(0.05)
            assert own.status is ModelStatus.WARM
            await ask(own, keep=0.0)
            await until(lambda: own.status is ModelStatus.UNLOADED)
            again, _ = await ask(own)
            assert again == first and own.switches["load"] == 1
            await ask(own, keep=0.02)
            assert own.status is ModelStatus.WARM
            await until(lambda: own.status is ModelStatus.UNLOADED)
            # keep_alive applies per key: another key's 0 does not unload the model.
            for keep in (-1.0, 60.0, None):
                await ask(own, keep=keep, caller="alice")
                await ask(own, keep=0.0, caller="bob")
                await asyncio.sleep(0.05)
                assert own.status is ModelStatus.WARM and own.switches["load"] == 2
            await ask(own, keep=0.0, caller="alice")
            await until(lambda: own.status is ModelStatus.UNLOADED)

        run(switcher, turns)


def test_models_are_loaded_one_at_a_time_and_freed_in_threads(
    folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load allocates its own arena. The garbage of imports is collected once, before the first."""
    built: list[int] = []
    collecting: list[threading.Thread] = []
    right, collect = Resident.build, gc.collect
    with opened(folders, weights_bytes=1 << 30) as switcher:

        def build(own: Resident) -> SpecEngine:
            built.append(sum(other.phase is Phase.LOADING for other in switcher.residents))
            return right(own)

        def noted() -> int:
            collecting.append(threading.current_thread())
            return collect()

        async def turns() -> None:
            engines = [weakref.ref(resident.engine) for resident in switcher.residents if resident.engine]
            monkeypatch.setattr(Resident, "build", build)
            monkeypatch.setattr(gc, "collect", noted)
            monkeypatch.setattr(gc, "unfreeze", None)
            await asyncio.gather(*(ask(resident, keep=0.0) for resident in switcher.residents))
            await until(
                lambda: all(resident.status is ModelStatus.UNLOADED for resident in switcher.residents)
            )
            await until(lambda: not any(resident.holds_weights for resident in switcher.residents))
            assert len(engines) == len(NAMES) and not any(engine() for engine in engines)
            texts = await asyncio.gather(*(ask(resident) for resident in switcher.residents))
            assert [len(tokens) for tokens, _ in texts] == [SHORT.max_tokens] * 3

        run(switcher, turns)
        assert built == [1, 1, 1]
        assert len(collecting) >= 6 and threading.main_thread() not in collecting


def test_one_that_cannot_be_loaded_takes_no_other_down(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    with opened([str(broken), *folders[:1]], keep_alive=0) as switcher:
        bad, good = switcher.residents
        weights = broken / "model.safetensors"

        async def turns() -> None:
            await until(lambda: not (bad.engine or good.engine))
            kept = weights.read_bytes()
            weights.write_bytes(kept[:2000])
            with pytest.raises(Failure, match=r"'broken' could not be loaded: .*safetensors") as raised:
                await ask(bad)
            assert raised.value.status == 503 and bad.status is ModelStatus.FAILED
            assert len((await ask(good))[0]) == SHORT.max_tokens
            weights.write_bytes(kept)
            with pytest.raises(Failure, match="could not be loaded"):
                await ask(bad)  # it is not retried at every request
            monkeypatch.setattr(resident_module, "RETRY_S", 0.0)
            assert len((await ask(bad, keep=9.0))[0]) == SHORT.max_tokens and bad.status is ModelStatus.WARM

        run(switcher, turns)
    (broken / "config.json").write_text("{}")
    with opened([str(broken), *folders[:1]]) as switcher:
        assert [resident.status for resident in switcher.residents] == [ModelStatus.FAILED, ModelStatus.WARM]
    with pytest.raises(CheckpointError), opened([str(broken)]):
        pass
    with pytest.raises(CapacityError, match="weights_bytes"), opened(folders[:1], weights_bytes=1 << 20):
        pass


def test_a_disconnect_while_waiting_ends_the_request_at_once(folders: list[str]) -> None:
    with opened(folders[:2], switch_after=60.0) as switcher:
        first, second = switcher.residents

        async def turns() -> None:
            long = asyncio.create_task(ask(first, params=LONG.model_copy(update={"max_tokens": 400})))
            await until(lambda: first.gate.running == 1)
            waits = asyncio.create_task(ask(second, params=LONG))
            await until(lambda: second.gate.running == 1)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            assert second.engine and second.engine.fault is None
            await until(lambda: not second.engine or second.engine.stats().waiting == 0)
            assert second.phase is Phase.RESTING and second.wanted_s is None
            # An answer that is still being read needs no model, which may even be unloaded.
            await long
            assert len((await ask(second))[0]) == SHORT.max_tokens  # an idle one makes way at once
            # So does one whose answer is complete but still being read.
            read = asyncio.create_task(ask(first, slow_s=60.0))
            await until(lambda: first.is_warm and not (first.gate.running or first.gate.waiting))
            assert len((await ask(second))[0]) == SHORT.max_tokens and not read.done()
            assert first.phase is Phase.RESTING and first.wanted_s is None
            read.cancel()

        run(switcher, turns)


def test_a_failed_engine_delays_no_other_model(folders: list[str]) -> None:
    with opened(folders[:2], switch_after=60.0) as switcher:
        first, second = switcher.residents

        async def turns() -> None:
            assert first.engine
            first.engine.abandon("It hangs.")
            assert first.status is ModelStatus.FAILED and switcher.fault == "It hangs."
            assert len((await ask(second))[0]) == SHORT.max_tokens
            assert first.engine is None and switcher.fault == "It hangs.", "its memory was freed first"

        run(switcher, turns)


@EXHAUSTIVE
@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), AssertionError("torn")])
def test_a_rest_that_fails_ends_the_process_only_where_memory_may_be_torn(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An OS error affects only its model: requests get its message, and a later one reloads the model."""
    with opened(folders[:2], switch_after=0.01) as switcher:
        first, second = switcher.residents
        is_torn = isinstance(error, AssertionError)

        def refuse(_: Arena) -> None:
            raise error

        async def turns() -> None:
            assert first.engine
            with monkeypatch.context() as patch:
                patch.setattr(Arena, "give_back", refuse)
                running = asyncio.create_task(ask(first, params=LONG.model_copy(update={"max_tokens": 400})))
                await until(lambda: first.gate.running == 1)
                assert len((await ask(second))[0]) == SHORT.max_tokens, "it got the arena despite this"
            with pytest.raises(EngineError):
                await running
            assert first.status is ModelStatus.FAILED and first.engine is None
            assert (switcher.fault is not None) == is_torn
            says = "its engine has failed" if is_torn else r"handed over \(Cannot allocate memory\)"
            with pytest.raises(Failure, match=f"'anna' is not loaded: .*{says}") as raised:
                await ask(first)
            assert (raised.value.status, raised.value.headers) == (503, {"Retry-After": "30"})
            monkeypatch.setattr(resident_module, "RETRY_S", 0.0)
            assert len((await ask(first))[0]) == SHORT.max_tokens
            assert switcher.fault is None and first.status is ModelStatus.WARM

        run(switcher, turns)


def test_a_hung_engines_memory_is_counted_until_its_step_ends(folders: list[str]) -> None:
    """Requests waiting for its arena are refused by name, and continue once it is released."""
    hangs, ends = threading.Event(), threading.Event()

    def hang(_: StepReport) -> None:
        hangs.set()
        ends.wait(60)

    with opened(folders[:2], switch_after=60.0) as switcher:
        first, second = switcher.residents

        async def turns() -> None:
            assert first.engine and second.engine
            first.engine.model.loop.observers.append(hang)
            asked = asyncio.create_task(ask(first))
            await until(hangs.is_set)
            waits = asyncio.create_task(ask(second))
            await until(lambda: second.gate.running == 1)
            first.engine.abandon("It hangs.")
            with pytest.raises(EngineError, match=r"It hangs"):
                await asked
            await until(lambda: second.blocked is not None)
            assert first.phase is Phase.STUCK and first.holds_arena and second.phase is Phase.RESTING
            with pytest.raises(Failure, match=r"'berta' cannot run: .* 'anna'") as inside:
                await waits
            assert inside.value.status == 503
            engine = second.engine
            await until(lambda: engine.stats().waiting == 0)
            with pytest.raises(Failure, match=r"'berta' cannot run: .* 'anna'.*restart") as raised:
                await ask(second)
            assert raised.value.status == 503
            ends.set()
            await until(lambda: first.engine is None and second.blocked is None)
            assert len((await ask(second))[0]) == SHORT.max_tokens

        run(switcher, turns)


def test_a_model_that_can_never_be_loaded_is_refused_at_once(folders: list[str]) -> None:
    """However long ago it was tried, no other model is unloaded for it."""
    with opened(folders[:2]) as switcher:
        first, second = switcher.residents
        assert second.engine
        second.engine.close()
        second.engine, second.refusal = None, ConfigError("no", field="quantize")

        async def turns() -> None:
            with pytest.raises(Failure, match="could not be loaded: no") as caught:
                await ask(second)
            assert caught.value.code == "model_not_loaded" and not caught.value.headers
            assert first.engine and len((await ask(first))[0]) == SHORT.max_tokens

        run(switcher, turns)


def test_weights_that_can_never_fit_end_no_task(folders: list[str]) -> None:
    with opened(folders[:1], weights_bytes=1 << 40) as switcher:
        (only,) = switcher.residents
        only.weight_bytes = 1 << 41

        async def free() -> None:
            async with asyncio.TaskGroup() as changes:
                switcher._free_weights(only, changes)

        asyncio.run(free())
        assert only.engine and not only.is_draining


def test_a_link_gives_a_model_its_name(folders: list[str], tmp_path: Path) -> None:
    link = tmp_path / "linked"
    link.symlink_to(folders[0])
    (only,) = open_models([link], CONFIG, ServerConfig()).residents
    assert only.names == ("linked",) and only.folder == Path(folders[0]).resolve()
    with pytest.raises(ConfigError, match="given twice"):
        open_models([link, folders[0]], CONFIG, ServerConfig())


def test_names_and_shares(folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fields(*models: str, **own: Any) -> str | None:
        with pytest.raises(ConfigError) as raised:
            open_models(models, CONFIG, ServerConfig(**own))
        return raised.value.field

    a, b, _ = folders
    assert fields(a, b, a) == "model"
    assert fields(a, b, served_model_name=["x"]) == fields(a, b, served_model_name=["x", "x"])
    assert fields(a, b, served_model_name=["x"]) == "served_model_name"
    (one,) = open_models([a], CONFIG, ServerConfig(served_model_name=["x", "y"])).residents
    assert one.names == ("x", "y") and one.config is CONFIG
    two = open_models([a, b], CONFIG, ServerConfig(served_model_name=["x", "y"])).residents
    assert [own.names for own in two] == [("x",), ("y",)]
    config = EngineConfig(max_running=2, max_model_len=256, host_cache_bytes=30 << 20)
    unset = open_models(folders, config, ServerConfig(arenas=3)).residents
    assert {own.config.host_cache_bytes for own in unset} == {10 << 20}
    alone = shares._open(Path(a), config)
    assert not isinstance(alone, Exception)
    assert {own.config.memory_bytes for own in unset} == {alone.memory_bytes}, "no more than it wants"

    monkeypatch.setattr(shares, "CAN_RELEASE", False)
    assert fields(a, b, arenas=1) == "arenas" and fields(a, b, keep_alive=1) == "keep_alive"
    assert fields(a, b, weights_bytes=1 << 30) == "weights_bytes"
    split = open_models(folders, CONFIG, ServerConfig())
    assert split.arenas == 3 and {resident.config.memory_bytes for resident in split.residents} == {
        ARENA // 3
    }


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / FILE


@pytest.fixture(scope="module")
def live(folders: list[str], fault: Path) -> Iterator[Live]:
    options = ["--memory-bytes", str(ARENA), "--dtype", "float32", "--switch-after", "0.05"]
    options += ["--draft", "suffix", "--no-adaptive", "--max-queued", "4", "--drain-seconds", "0.2"]
    names, env = folders[1:], {FILE: str(fault)}
    with Live(*options, model=folders[0], beside=names, entry="tests.server.faulty", env=env) as own:
        yield own


def complete(live: Live, model: str | None, **own: Any) -> Any:
    return live.ask(
        "/v1/completions",
        {"model": model, "prompt": PROMPTS[0], "max_tokens": 60, "seed": 5, "ignore_eos": True, **own},
    )


def states(live: Live) -> dict[str, str]:
    return {card["id"]: card["state"] for card in live.ask("/v1/models").json["data"]}


def test_over_http_the_models_name_picks(live: Live) -> None:
    assert states(live) == {"anna": "warm", "berta": "resting", "clara": "resting"}
    with ThreadPoolExecutor(9) as pool:
        found = [*pool.map(lambda name: complete(live, name, temperature=0.8), NAMES * 3)]
    assert {(own.status, own.json["choices"][0]["text"]) for own in found} == {
        (200, found[0].json["choices"][0]["text"])
    }
    assert [own.json["model"] for own in found] == [*NAMES * 3]
    assert complete(live, None).json["model"] == "anna"
    refused = complete(live, "doris")
    assert refused.status == 404 and all(name in refused.error["message"] for name in NAMES)
    figures = live.metrics()
    for name in NAMES:
        key = f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{name}"}}'
        assert figures[key] == 3 + (name == "anna")
    assert total(figures, "specdec:model_switches_total") >= 3
    assert total(figures, "specdec:model_state") == 3
    assert live.ask("/server_info?model=berta").json["model"] == "berta"
    assert live.ask("/tokenize", {"model": "clara", "prompt": "def"}).json["count"] > 0


RUNNING = "vllm:num_requests_running"


def unloaded(live: Live, name: str) -> None:
    """Unload a model now, and wait for that."""
    assert complete(live, name, keep_alive=0, max_tokens=1).status == 200
    wait_for(lambda: states(live)[name] == "unloaded")


def test_over_http_a_request_sets_keep_alive(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = complete(live, "berta", keep_alive="soon")
    assert wrong.status == 400 and wrong.error["param"] == "keep_alive"
    assert complete(live, "berta", keep_alive="0s").status == 200
    wait_for(lambda: states(live)["berta"] == "unloaded")
    info = live.ask("/server_info?model=berta").json
    assert info["models"]["berta"] == "unloaded" and "steps" not in info
    assert live.ask("/health").status == 200
    assert complete(live, "berta").status == 200 and states(live)["berta"] == "warm"
    for name, code, says in (
        ("berta", 2, "'berta' is unloaded"),
        ("doris", 2, "it does not serve the model 'doris'"),
    ):
        unloaded(live, "berta")
        assert main(["top", live.url, "--model", name, "--once"]) == code
        assert says in capsys.readouterr().err
    assert main(["top", live.url, "--model", "clara", "--once", "--interval", "0.01"]) == 0
    assert capsys.readouterr().out.startswith("clara (and 2 more: --model) at ")


@EXHAUSTIVE
def test_over_http_a_slow_reader_holds_no_weights_and_reads_its_whole_text(live: Live) -> None:
    """Its answer is larger than all buffers, so that it is still being read when the model is unloaded."""
    asked = {"prompt": PROMPTS[0], "seed": 5, "max_tokens": 450, "ignore_eos": True, "logprobs": 20, "n": 3}
    with open_stream(live, {"model": "clara", "stream": True, **asked}, buffer=1 << 16) as reader:
        wait_for(lambda: running(live, "clara") > 0)
        wait_for(lambda: running(live, "clara") == 0)
        refused = complete(live, "clara", n=2)
        assert refused.status == 429 and "clara" in refused.error["message"], "it is still being read"
        unloaded(live, "clara")
        with reader.makefile("rb") as lines:
            said = list(iter(lines.readline, b"data: [DONE]\n"))
    events = [json.loads(line[6:]) for line in said if line.startswith(b"data: {")]
    pieces = [own for event in events for own in event["choices"]]
    texts = ["".join(piece["text"] for piece in pieces if piece["index"] == index) for index in range(3)]
    assert [piece["finish_reason"] for piece in pieces].count("length") == 3
    whole = complete(live, "anna", **asked).json["choices"]
    assert texts == [own["text"] for own in whole]


def running(live: Live, name: str) -> float:
    """Return how many requests a model's engine runs."""
    own = (value for key, value in live.metrics().items() if f'model_name="{name}"' in key and RUNNING in key)
    return next(own, 0.0)


def test_over_http_loading_delays_no_other_model_and_log_lines_name_models(live: Live, fault: Path) -> None:
    unloaded(live, "berta")
    begun = len(live.said)
    fault.write_text("load")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(complete, live, "berta", n=4)
        wait_for(lambda: states(live)["berta"] == "loading")
        assert complete(live, "anna").status == 200 and complete(live, "berta").status == 429
        assert not waits.done() and states(live)["berta"] == "loading"
        fault.unlink()
        assert waits.result().status == 200
    fault.write_text("planned")
    assert complete(live, "berta").status == 500
    wait_for(lambda: any("berta: a step failed" in line for line in live.said[begun:]))
    assert any("loaded berta in" in line for line in live.said[begun:])
    assert any("INFO specdec.setup.resolve: berta: settings" in line for line in live.said[:begun])
    repeated = [line for line in live.said[begun:] if " INFO specdec." in line and ": berta: " in line]
    assert not [line for line in repeated if ".server." not in line]


def test_a_stopping_server_does_not_wait_for_loading(live: Live, fault: Path) -> None:
    unloaded(live, "berta")
    fault.write_text("load")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(complete, live, "berta")
        wait_for(lambda: states(live)["berta"] == "loading")
        code, said = live.stop()
        assert code == 0 and "cannot be loaded" not in said
        assert waits.result().status == 503 and waits.result().error["code"] == "stopping"
