"""Deltas of one HTTP request's prompts, handed from the engine's thread to the event loop."""

import asyncio
import contextlib
import threading
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Self

from specdec.config.engine import MAX_WINDOW
from specdec.core.outputs import CollectedOutput, Delta
from specdec.core.params import PreparedPrompt
from specdec.engine.engine import SpecEngine, Ticket
from specdec.errors import SpecdecError
from specdec.server.failures import Failure

FEW = 8
"""Maximum choices streamed step by step; with more, events are coalesced by `SHARE`."""
SHARE = 0.1
"""Fraction of the time the event loop may use while streaming: the engine waits meanwhile.

`tiny` on two cores, tokens/s of 64 and 16 streams with 0.03, 0.1 and 0.3: 4,525 and 4,217, 4,514 and 3,843,
3,557 and 3,535. With 0.03 twelve streams get an event for every ten tokens.
"""
LONGEST_S = 0.1
"""Maximum seconds that deltas are held back."""


class RequestDeadline:
    """A request's deadline, counted from its arrival; it may be brought forward."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start_s = seconds, time.perf_counter()
        self._at_s = asyncio.get_running_loop().time() + seconds
        self._failure: Failure | None = None
        self._waits: asyncio.Task[object] | None = None

    def end(self, failure: Failure) -> None:
        """Raise this in the request's current or next wait; call from the event loop."""
        self._failure = failure
        if self._waits:
            self._waits.cancel()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Bound the time spent in the block by the deadline."""
        timeout = Failure(504, f"The answer took longer than {self.seconds:g} s.", code="timeout")
        if self._failure:
            raise self._failure
        self._waits = task = asyncio.current_task()
        try:
            async with asyncio.timeout_at(self._at_s) as bound:
                yield
        except TimeoutError:
            if not bound.expired():
                raise  # not this deadline
            raise timeout from None
        except asyncio.CancelledError:
            if self._failure is None or task is None:
                raise
            task.uncancel()
            raise self._failure from None
        finally:
            self._waits = None
        if asyncio.get_running_loop().time() >= self._at_s:
            raise timeout  # a block that never waits would not notice


class NewOutput(NamedTuple):
    """Output of a choice since the last read."""

    choice: int
    delta: Delta
    steps: tuple[tuple[float, int], ...]
    """End time and number of tokens of each step."""


class PendingOutput:
    """Unread output of a choice, in columns."""

    __slots__ = ("_at_s", "_counts", "said")

    def __init__(self) -> None:
        self.said = CollectedOutput()
        self._at_s, self._counts = array("d"), array("i")

    def add(self, delta: Delta) -> None:
        """Append a delta with the current time."""
        self.said.add(delta)
        self._at_s.append(time.perf_counter())
        self._counts.append(len(delta.token_ids))

    def steps(self) -> tuple[tuple[float, int], ...]:
        """Return the end time and number of tokens of each step."""
        return tuple(zip(self._at_s, self._counts, strict=True))


def check_size(prepared: Sequence[PreparedPrompt], longest: int, most: int, *, top: str) -> None:
    """Refuse an answer that may hold more tokens and log-probabilities than the server has memory for.

    `longest` bounds a sequence; `top` is the field that requests log-probabilities.
    """
    params = prepared[0].params
    alternatives = (params.logprobs or 0) + (MAX_WINDOW if params.trees else 0)
    lengths = [len(prompt.ids) for prompt in prepared]
    tokens = sum(min(params.max_tokens, longest - length) for length in lengths)
    generated = params.n * tokens * (1 + alternatives)
    scored = 0 if params.prompt_logprobs is None else params.n * sum(lengths) * (1 + params.prompt_logprobs)
    if generated + scored <= most:
        return
    field = "max_tokens" if generated >= scored else "prompt_logprobs"
    raise Failure(
        400,
        f"{field}: the answer might hold {generated + scored:,} values, more than {most:,} "
        f"(max_answer_values): n times max_tokens times one more than {top} ({1 + alternatives}), and what "
        f"prompt_logprobs asks for; lower one of them.",
        param=field,
    )


class StreamWaker:
    """Wakes the event loop when deltas are pending: at once for few streams, at a bounded rate for many.

    Up to `FEW` streamed choices get an event per step; steps that end while the event loop is busy share the
    next event. With more, events would cost the engine thread, which shares the interpreter, more than the
    steps do: the loop then pauses after each round, in proportion to its CPU time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.streams = 0
        """Number of choices being streamed."""
        self._notified: deque[Answers] = deque()
        self._called = self._resting = False
        self._timer: asyncio.TimerHandle | None = None
        self._worked_s = 0.0

    def notify(self, answers: "Answers", *, soon: bool) -> None:
        """Schedule the reading of pending deltas; called from the engine thread."""
        if not answers.is_notified:
            answers.is_notified = True
            self._notified.append(answers)
        if (soon or not self._resting) and not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._wake_readers)

    def _wake_readers(self) -> None:
        self._called = self._resting = False  # cleared first, so that a later ring schedules another call
        if self._timer:
            self._timer.cancel()
        count, before_s, self._worked_s = len(self._notified), self._worked_s, time.thread_time()
        for _ in range(count):
            answers = self._notified.popleft()
            answers.is_notified = False
            answers.wake_reader()
        if count and self.streams > FEW:
            self._resting = True
            rest_s = min((self._worked_s - before_s) / SHARE, LONGEST_S)
            self._timer = self._loop.call_later(rest_s, self._wake_readers)


class Answers:
    """The running choices of some prompts, `n` of each. Leaving the context cancels them.

    Unread output of a slow reader is stored here; it is bounded by the choices' total output.
    """

    def __init__(
        self,
        engine: SpecEngine,
        bell: StreamWaker,
        prepared: Sequence[PreparedPrompt],
        *,
        streams: bool,
        deadline: RequestDeadline,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        self.bell, self.prepared, self.until = bell, prepared, deadline
        self.streams = streams
        """Whether deltas are streamed as they arrive."""
        self._engine: SpecEngine | None = engine
        self._ticket: Ticket | None = None
        self._on_over = on_over
        """Called once in the event loop when the engine has finished with it."""
        self.n = prepared[0].params.n
        self.left = sum(prompt.params.n for prompt in prepared)
        """Number of choices whose last delta has not been yielded."""
        self._streamed = self.left if streams else 0
        self.came = asyncio.Event()
        self.is_notified = False
        self._without_output = set(range(self.left))
        """Choices without a delta so far."""
        self._unfinished = self.left
        self._pending: dict[int, PendingOutput] = {}
        """Unread output by choice."""
        self._lock = threading.Lock()
        """Held by the engine thread to append, and by the event loop to read."""
        self._error: SpecdecError | None = None

    def __enter__(self) -> Self:
        assert self._engine
        self._ticket, self._engine = self._engine.submit(self.prepared, self._take), None
        self.bell.streams += self._streamed
        return self

    def __exit__(self, *_: object) -> None:
        self.bell.streams -= self._streamed
        if self._ticket:
            self._ticket.cancel()

    @property
    def is_over(self) -> bool:
        """Whether the engine has finished with it, read or not."""
        return not self._unfinished or self._error is not None

    def fail(self, failure: Failure) -> None:
        """End it with an error, unless it is finished."""
        if not self.is_over:
            self.until.end(failure)

    def wake_reader(self) -> None:
        """Wake the reader; if finished, stop counting as a user of the engine."""
        self.came.set()
        if self.is_over and self._ticket:
            self._ticket = None
            self._on_over()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prepared.ids) for prepared in self.prepared)

    def _take(self, prompt: int, item: Delta | SpecdecError) -> None:
        """Queue a delta and wake the event loop; called in the engine thread."""
        if isinstance(item, SpecdecError):
            self._error = self._error or item
            self.bell.notify(self, soon=True)
            return
        choice = prompt * self.n + item.index
        with self._lock:
            self._pending.setdefault(choice, PendingOutput()).add(item)
        self._unfinished -= item.finish_reason is not None
        if not self._unfinished:
            self.bell.notify(self, soon=True)
        elif self.streams:
            self.bell.notify(self, soon=choice in self._without_output or item.finish_reason is not None)
            self._without_output.discard(choice)

    async def __aiter__(self) -> AsyncIterator[NewOutput]:
        """Yield each choice's deltas; pending ones are merged."""
        while self.left:
            async with self.until.held():
                await self.came.wait()
            self.came.clear()
            if self._error:
                raise self._error
            with self._lock:
                pending, self._pending = self._pending, {}
            if any(output.said.finish_reason == "abort" for output in pending.values()):
                # No API has a finish reason for a cancelled answer.
                raise Failure(503, "The answer was cancelled before its end.", code="cancelled")
            for choice in list(pending):
                output = pending.pop(choice)
                self.left -= output.said.finish_reason is not None
                yield NewOutput(choice, output.said.delta(), output.steps())
