"""A grammar as the engine sees it: the process that follows its outputs, and each of these."""

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.text.grammar.template import Link
from specdec.text.grammar.wire import COST, Job, Kind, Path, pack

FAULTS = 1
"""Outputs that may end the process of a form; with the next the form is at fault, and all of them end."""
GIVEN_UP_S = 10.0
"""Without a word from a process that was asked: a frame may hold many outputs, whose answers come in turn."""
SLOW_S = 0.002
"""Of a processor, for a place: an output of which one takes longer is not waited for for a while."""
BACKOFF = 16
"""Tokens that this is, the first time; twice as many each time."""

T = TypeVar("T")
TOO_SLOW = "its grammar takes too long or too much memory; write an unambiguous one"
NOWHERE = "the grammar allows no further token; give one that can always end"


class Place(NamedTuple):
    """What is known of an output followed by a path."""

    kind: Kind
    bits: bytearray | None = None
    """The words of what may follow, in no tensor: a caller's thread may be the last to hold a form."""


class Asked(NamedTuple):
    """A job that is under way, and what has to be known to understand its answer."""

    guide: "weakref.ref[Guide]"
    length: int
    """Tokens that the output had."""
    paths: Sequence[Path]


class Form:
    """A compiled form. Only the engine's thread asks it anything.

    Its process works on one frame of jobs at a time; what comes up meanwhile makes the next. Where what is
    done for one output ends the process, that output ends, and another process follows the others, once.
    """

    def __init__(
        self, link: Link, first: Place, *, width: int, compile_again: "Callable[[], Future[Form]]"
    ) -> None:
        self.link, self.first = link, first
        self.mask_bytes = 4 * width
        self._compile_again = compile_again
        self._again: Future[Form] | None = None
        self._faults = 0
        """Outputs that have ended its process."""
        self._guides: weakref.WeakSet[Guide] = weakref.WeakSet()
        self._asking: dict[Guide, None] = {}
        self._under_way: deque[Asked] = deque()
        self._sent_s = 0.0
        self._ended: deque[int] = deque()
        """Outputs that are over, of which its process has to hear."""
        self.numbers = itertools.count()

    def ask(self, guide: "Guide") -> None:
        """Answer a guide's questions."""
        if guide not in self._guides:
            self._guides.add(guide)
            weakref.finalize(guide, self._ended.append, guide.number).atexit = False
        self._asking[guide] = None
        self._send()

    def take(self, limit_s: float) -> bool:
        """Hand out the answers that have come, or wait so long for the first; tell whether any came."""
        came = False
        for frame in self.link.frames(limit_s):
            asked = self._under_way.popleft()
            if guide := asked.guide():
                guide.learn(asked, frame)
            came = True
        if self._under_way and time.monotonic() - max(self._sent_s, self.link.heard_s) > GIVEN_UP_S:
            self.link.close()
        if self.link.is_over:
            self._begin_again(0.0 if came else limit_s)
        elif not self._under_way:
            self._send()
        return came

    def _send(self) -> None:
        asking = [guide for guide in self._asking if not guide.fault]
        if self._under_way or not asking or self.link.is_over:
            return
        self._asking.clear()
        jobs = [Job(self._ended.popleft(), None) for _ in range(len(self._ended))]
        for guide in asking:
            jobs.append(guide.job())
            self._under_way.append(Asked(weakref.ref(guide), guide.length, jobs[-1].paths))
        self._sent_s = time.monotonic()
        if not self.link.send(pack(jobs)):
            self._under_way.clear()  # it had ended before, for none of their sakes

    def _begin_again(self, limit_s: float) -> None:
        """End the output whose answer has not come, and have the others followed by another process."""
        if self._under_way and (guide := self._under_way[0].guide()):
            guide.fail(TOO_SLOW)
            self._faults += 1
        self._under_way.clear()
        left = [guide for guide in self._guides if not guide.fault]
        if self._faults > FAULTS:
            for guide in left:
                guide.fail(TOO_SLOW)
            return
        if not left:
            return
        if self._again is None:
            self._again = self._compile_again()
        if not wait([self._again], limit_s).done:
            return
        again, self._again = self._again, None
        try:
            self.link = again.result().link
        except Exception:
            for guide in left:
                guide.fail(TOO_SLOW)
            return
        self._ended.clear()
        for guide in left:
            guide.begin_again()
            self._asking[guide] = None
        self._send()


class Guide:
    """Follows one output through its form, and drafts ahead of it; the form's process answers."""

    field = "structured_outputs"

    def __init__(self, form: Form) -> None:
        self._form = form
        self.number = next(form.numbers)
        self._taken: list[int] = []
        self._told = 0
        """How many of them the form's process has heard of."""
        self._known: dict[Path, Place] = {(): form.first}
        self._wanted: dict[Path, None] = {}
        """What was asked and is not known yet."""
        self._unsent: list[Path] = []
        self._patience, self._backoff = 0, BACKOFF
        """Tokens to come for which no step waits, and how many they will be the next time."""
        self._fault: str | None = None

    @property
    def fault(self) -> str | None:
        """Return why the output cannot go on, if so."""
        here = self._known.get(())
        return NOWHERE if here and here.kind == Kind.DEAD else self._fault

    @property
    def is_over(self) -> bool:
        here = self._known.get(())
        return here is not None and here.kind == Kind.OVER

    @property
    def is_slow(self) -> bool:
        """Return whether it was late or takes long, so that nothing is drafted for it for a while."""
        return self._patience > 0

    @property
    def length(self) -> int:
        return len(self._taken)

    def knows(self, path: Sequence[int]) -> bool:
        return self.fault is not None or tuple(path) in self._known

    def words(self, path: Sequence[int]) -> Tensor | None:
        place = self._known.get(tuple(path))
        bounded = place and place.bits
        return torch.frombuffer(bounded, dtype=torch.int32) if bounded else None

    def ask(self, paths: Collection[Path]) -> None:
        """Start computing what may follow some paths. A fault ends all asking."""
        new = [path for path in paths if path not in self._known and path not in self._wanted]
        if self.fault or not new:
            return
        self._wanted.update(dict.fromkeys(new))
        self._unsent += new
        self._form.ask(self)

    def wait(self, until_s: float, *, always: bool) -> None:
        """Wait until then for all that was asked, unless it has just been late."""
        while self._wanted and not self.fault:
            waits = (always or not self._patience) and time.monotonic() < until_s
            if not self._form.take(until_s - time.monotonic() if waits else 0.0) and not waits:
                break
        if self._wanted and not self.fault:
            self._patience = max(self._patience, 1)

    def observe(self, token: int) -> bool:
        """Take an accepted token, and keep of what is known what follows it."""
        self._taken.append(token)
        self._known = _behind(token, self._known)
        self._wanted = _behind(token, self._wanted)
        self._unsent = [path[1:] for path in self._unsent if path[:1] == (token,)]
        self._patience = max(self._patience - 1, 0)
        return True

    def job(self) -> Job:
        """Return what the form's process does not know yet."""
        job = Job(self.number, self._taken[self._told :], self._unsent)
        self._told, self._unsent = len(self._taken), []
        return job

    def learn(self, asked: Asked, answer: bytes) -> None:
        """Read an answer, which may be of the output as it was some tokens ago."""
        since, at = tuple(self._taken[asked.length :]), COST.size
        (took_s,) = COST.unpack_from(answer)
        if took_s > SLOW_S * max(len(asked.paths), 1) and not self.is_slow:
            self._patience, self._backoff = self._backoff, 2 * self._backoff
        for path in asked.paths:
            kind = Kind(answer[at])
            words = answer[at + 1 : at + 1 + self._form.mask_bytes] if kind == Kind.BOUND else b""
            at += 1 + len(words)
            if path[: len(since)] == since:
                self._known[path[len(since) :]] = place_of(kind, words)
                self._wanted.pop(path[len(since) :], None)

    def fail(self, fault: str) -> None:
        self._fault = fault
        self._wanted.clear()

    def begin_again(self) -> None:
        """Follow the whole output in another process."""
        self._told, self._unsent = 0, list(self._wanted)


def place_of(kind: Kind, words: bytes) -> Place:
    return Place(kind, bytearray(words) if words else None)


def _behind(token: int, paths: Mapping[Path, T]) -> dict[Path, T]:
    """Keep the paths that begin with a token, without it."""
    return {path[1:]: own for path, own in paths.items() if path[:1] == (token,)}
