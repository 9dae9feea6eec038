"""Engine events reach the event loop: at once for a single waiter, batched for many streams."""

import asyncio
import collections
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from specdec import SamplingParams
from specdec.core.outputs import Delta
from specdec.core.params import ValidatedParams
from specdec.engine.engine import PreparedPrompt
from specdec.errors import EngineError, SpecdecError
from specdec.server import answers as module
from specdec.server.answers import Answers, NewOutput, RequestDeadline, StreamWaker
from specdec.server.failures import Failure
from specdec.server.state import QueueSlots

Emit = Callable[[int, Delta | SpecdecError], None]


class Spoken:
    """A fake engine that emits given events from its own thread."""

    def __init__(self, speak: Callable[[Emit], None]) -> None:
        self.speak, self.cancelled = speak, False

    def submit(self, prepared: Sequence[PreparedPrompt], emit: Emit) -> "Spoken":
        self.thread = threading.Thread(target=self.speak, args=(emit,))
        self.thread.start()
        return self

    def cancel(self) -> None:
        self.cancelled = True


@asynccontextmanager
async def asked(
    speak: Callable[[Emit], None], *, choices: int = 1, streams: bool = True
) -> AsyncIterator[AsyncIterator[NewOutput]]:
    prepared = [PreparedPrompt((1,), ValidatedParams(SamplingParams(n=choices)))]
    engine = Spoken(speak)
    answers = Answers(
        engine,
        StreamWaker(asyncio.get_running_loop()),
        prepared,
        streams=streams,
        deadline=RequestDeadline(30),
    )  # type: ignore[arg-type]
    with answers:
        yield aiter(answers)
    await asyncio.to_thread(engine.thread.join)
    assert engine.cancelled or answers.is_over


def part(index: int, token: int, *, last: bool = False) -> Delta:
    return Delta(f"{token} ", (token,), index=index, finish_reason="stop" if last else None)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_everything_arrives_in_its_order(seed: int, streams: bool) -> None:
    """With any pauses: none is lost between the loop's check and its rest."""
    rng, choices, count = random.Random(seed), 5, 200

    def speak(emit: Emit) -> None:
        for token in range(count):
            for choice in range(choices):
                emit(0, part(choice, token, last=token == count - 1))
            if rng.random() < 0.3:
                time.sleep(rng.choice([0, 1e-5, 1e-3, 5e-3]))

    async def hear() -> list[list[int]]:
        said: list[list[int]] = [[] for _ in range(choices)]
        async with asked(speak, choices=choices, streams=streams) as parts:
            async for choice, delta, steps in parts:
                said[choice] += delta.token_ids
                assert sum(tokens for _, tokens in steps) == len(delta.token_ids)
                assert [at_s for at_s, _ in steps] == sorted(at_s for at_s, _ in steps)
        return said

    assert asyncio.run(hear()) == [list(range(count))] * choices


def test_an_answer_that_is_cancelled_is_no_answer() -> None:
    def speak(emit: Emit) -> None:
        emit(0, part(0, 1, last=True))
        emit(0, Delta("2", (2,), index=1, finish_reason="abort"))

    async def hear() -> list[int]:
        async with asked(speak, choices=2, streams=False) as parts:
            return [choice async for choice, _, _ in parts]

    with pytest.raises(Failure, match="cancelled before its end"):
        asyncio.run(hear())


class Ears:
    """Block an emitter until its events have arrived."""

    def __init__(self) -> None:
        self.heard: dict[tuple[int, int], threading.Event] = collections.defaultdict(threading.Event)

    async def listen(self, parts: AsyncIterator[NewOutput]) -> list[tuple[int, tuple[int, ...]]]:
        said = []
        async for choice, delta, _ in parts:
            said.append((choice, delta.token_ids))
            for token in delta.token_ids:
                self.heard[choice, token].set()
        return said

    def wait(self, choice: int, token: int) -> None:
        assert self.heard[choice, token].wait(20)


def test_a_delta_before_a_pause_is_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second arrives while the loop rests, and nothing after it wakes the loop."""
    monkeypatch.setattr(module, "FEW", 0)
    monkeypatch.setattr(module, "SHARE", 1e-9)  # the longest rest after every round
    ears = Ears()

    def speak(emit: Emit) -> None:
        for token in range(2):
            emit(0, part(0, token))
            ears.wait(0, token)
        emit(0, part(0, 2, last=True))

    async def hear() -> list[tuple[int, tuple[int, ...]]]:
        async with asked(speak) as parts:
            return await ears.listen(parts)

    assert asyncio.run(hear()) == [(0, (0,)), (0, (1,)), (0, (2,))]


@pytest.mark.parametrize(("choices", "rests"), [(module.FEW, False), (module.FEW + 1, True)])
def test_the_loop_rests_only_beyond_a_number_of_streamed_choices(
    choices: int, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of requests: these belong to one."""
    rested, look = [], StreamWaker._wake_readers

    def note(bell: StreamWaker) -> None:
        look(bell)
        rested.append(bell._resting)

    monkeypatch.setattr(StreamWaker, "_wake_readers", note)

    def speak(emit: Emit) -> None:
        for choice in range(choices):
            emit(0, part(choice, 0, last=True))

    async def hear() -> int:
        async with asked(speak, choices=choices) as parts:
            return len([own async for own in parts])

    assert asyncio.run(hear()) == choices
    assert any(rested) == rests


def test_a_delta_after_a_pause_is_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiter and no timer is active: the event itself wakes the loop."""
    monkeypatch.setattr(module, "FEW", 0)
    monkeypatch.setattr(module, "LONGEST_S", 1e-3)
    ears, idle, look = Ears(), threading.Event(), StreamWaker._wake_readers

    def tell(bell: StreamWaker) -> None:
        found = len(bell._notified)
        look(bell)
        if not found:
            idle.set()

    monkeypatch.setattr(StreamWaker, "_wake_readers", tell)

    def speak(emit: Emit) -> None:
        emit(0, part(0, 0))
        assert idle.wait(20)
        emit(0, part(0, 1))
        try:
            ears.wait(0, 1)
        finally:
            emit(0, part(0, 2, last=True))

    async def hear() -> list[tuple[int, tuple[int, ...]]]:
        async with asked(speak) as parts:
            return await ears.listen(parts)

    assert asyncio.run(hear()) == [(0, (0,)), (0, (1,)), (0, (2,))]


def test_deltas_are_batched_while_the_loop_pauses_but_not_first_and_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FEW", 0)
    monkeypatch.setattr(module, "SHARE", 1e-9)
    monkeypatch.setattr(module, "LONGEST_S", 600.0)
    ears = Ears()

    def speak(emit: Emit) -> None:
        emit(0, part(0, 0))
        ears.wait(0, 0)
        emit(0, part(1, 0))
        ears.wait(1, 0)
        for token in range(1, 50):
            emit(0, part(0, token, last=token == 49))
        ears.wait(0, 49)
        for token in range(1, 9):
            emit(0, part(1, token, last=token == 8))

    async def hear() -> list[tuple[int, tuple[int, ...]]]:
        async with asked(speak, choices=2) as parts:
            return await ears.listen(parts)

    said = [(choice, len(tokens)) for choice, tokens in asyncio.run(hear())]
    assert said == [(0, 1), (1, 1), (0, 49), (1, 8)]


def test_each_step_of_one_stream_is_a_separate_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer delays a step, however long the loop would rest with many streams."""
    monkeypatch.setattr(module, "SHARE", 1e-9)
    monkeypatch.setattr(module, "LONGEST_S", 600.0)
    ears = Ears()

    def speak(emit: Emit) -> None:
        try:
            for token in range(20):
                emit(0, part(0, token))
                ears.wait(0, token)
        finally:
            emit(0, part(0, 20, last=True))

    async def hear() -> list[tuple[int, tuple[int, ...]]]:
        async with asked(speak) as parts:
            return await ears.listen(parts)

    assert asyncio.run(hear()) == [(0, (token,)) for token in range(21)]


def test_steps_that_end_while_a_reader_is_blocked_are_one_event() -> None:
    read, written = threading.Event(), threading.Event()

    def speak(emit: Emit) -> None:
        emit(0, part(0, 0))
        assert read.wait(20)
        for token in range(1, 101):
            emit(0, part(0, token))
        written.set()
        emit(0, part(0, 101, last=True))

    async def hear() -> list[int]:
        counts = []
        async with asked(speak) as parts:
            async for _, delta, _ in parts:
                counts.append(len(delta.token_ids))
                read.set()
                await asyncio.to_thread(written.wait, 20)
        return counts

    counts = asyncio.run(hear())
    assert counts[0] == 1 and counts[1] >= 100 and sum(counts) == 102


@pytest.mark.parametrize("streams", [True, False])
def test_an_error_is_raised_at_once(streams: bool) -> None:
    def speak(emit: Emit) -> None:
        emit(0, part(0, 0))
        emit(0, EngineError("broken"))

    async def hear() -> None:
        async with asked(speak, streams=streams) as parts:
            async for _ in parts:
                pass

    with pytest.raises(EngineError, match="broken"):
        asyncio.run(hear())


def test_callers_without_streaming_are_woken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = StreamWaker._wake_readers
    monkeypatch.setattr(StreamWaker, "_wake_readers", lambda self: (looks.append(1), look(self)))

    def speak(emit: Emit) -> None:
        for token in range(50):
            emit(0, part(0, token, last=token == 49))
            time.sleep(1e-3)

    async def hear() -> list[int]:
        async with asked(speak, streams=False) as parts:
            return [len(own.delta.token_ids) async for own in parts]

    assert asyncio.run(hear()) == [50] and len(looks) == 1


def test_queue_slots_are_held_until_the_engine_has_dropped_every_choice() -> None:
    """A client that disconnects at once cannot exceed its share."""
    released, left, dropped = list[str](), threading.Event(), threading.Event()

    def speak(emit: Emit) -> None:
        emit(0, part(0, 1))
        left.wait(20)
        for choice in range(2):
            emit(0, Delta("", (), index=choice, finish_reason="abort"))
        dropped.set()

    async def leave() -> None:
        places = QueueSlots(lambda: released.append("places"))
        engine = Spoken(speak)
        prepared = [PreparedPrompt((1,), ValidatedParams(SamplingParams(n=2)))]
        bell = StreamWaker(asyncio.get_running_loop())
        answers = Answers(
            engine,  # type: ignore[arg-type]
            bell,
            prepared,
            streams=True,
            deadline=RequestDeadline(30),
            on_over=places.let_go,
        )
        with answers:
            places.hold()
            async for _ in answers:
                break
        places.let_go()
        await asyncio.sleep(0.01)
        assert engine.cancelled and not released, "the engine still has them"
        left.set()
        await asyncio.to_thread(dropped.wait, 20)
        async with asyncio.timeout(20):
            while not released:
                await asyncio.sleep(0.001)

    asyncio.run(leave())
    assert released == ["places"]
