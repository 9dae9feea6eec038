"""From the engine's thread to the event loop: what comes of one HTTP request's prompts, as it comes."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import NamedTuple, Self

from specdec.config import SamplingParams
from specdec.engine import Prompt, SpecEngine
from specdec.errors import SpecdecError
from specdec.outputs import Delta
from specdec.server.failures import Failure

Item = Delta | SpecdecError


class Said(NamedTuple):
    """What a choice has gained since it was last looked at."""

    choice: int
    delta: Delta


class Mailbox:
    """Carries what all requests say into the event loop, once for all that came since it last looked.

    Waking the loop for every piece would cost the engine's thread more than the piece itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Answers, int, Item]] = deque()
        self._called = False

    def put(self, to: "Answers", prompt: int, item: Item) -> None:
        """Take something from the engine's thread."""
        self._letters.append((to, prompt, item))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before the first is taken: what comes now calls again
        for _ in range(len(self._letters)):
            to, prompt, item = self._letters.popleft()
            to.take(prompt, item)


class Answers:
    """The choices of some prompts: `n` of each, those of one prompt together. Leaving it ends what runs.

    What a slow reader has not taken waits here, at most all that its choices will ever say.
    """

    def __init__(
        self,
        engine: SpecEngine,
        mailbox: Mailbox,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        timeout_s: float,
    ) -> None:
        self.params, self.mailbox, self.timeout_s = params, mailbox, timeout_s
        self.prepared = [engine.prepare(prompt, params) for prompt in prompts]
        """All are looked at before one is begun: a mistake in the last must not cost the first's work."""
        self.engine = engine
        self.left = params.n * len(prompts)
        """Choices that have not ended."""
        self._waiting: deque[tuple[int, Delta]] = deque()
        self._error: SpecdecError | None = None
        self._came = asyncio.Event()

    def __enter__(self) -> Self:
        self._ticket = self.engine.submit(self.prepared, partial(self.mailbox.put, self))
        return self

    def __exit__(self, *_: object) -> None:
        self._ticket.cancel()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prepared.ids) for prepared in self.prepared)

    def take(self, prompt: int, item: Item) -> None:
        """Hear from the mailbox."""
        if isinstance(item, SpecdecError):
            self._error = self._error or item
        else:
            self._waiting.append((prompt * self.params.n + item.index, item))
        self._came.set()

    async def __aiter__(self) -> AsyncIterator[Said]:
        """Yield what each choice says; of one that said more than once meanwhile all at once."""
        until_s = asyncio.get_running_loop().time() + self.timeout_s
        while self.left:
            try:
                async with asyncio.timeout_at(until_s):
                    await self._came.wait()
            except TimeoutError:
                raise Failure(
                    504, f"The answer took longer than {self.timeout_s:g} s.", code="timeout"
                ) from None
            self._came.clear()
            if self._error:
                raise self._error
            choices: dict[int, list[Delta]] = {}
            while self._waiting:
                choice, delta = self._waiting.popleft()
                choices.setdefault(choice, []).append(delta)
            for choice, deltas in choices.items():
                self.left -= deltas[-1].finish_reason is not None
                yield Said(choice, Delta.joined(deltas))
