"""The engine's side of a grammar: its process, and one guide per output."""

import itertools
import marshal
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.text.grammar.template import Link
from specdec.text.grammar.wire import COST, Job, Kind, Path

FAULTS = 1
"""Outputs that may get a grammar's process killed; one more, and all outputs of the grammar fail."""
GIVEN_UP_S = 10.0
"""Seconds without a frame from a busy process; a frame may hold the answers of many outputs."""
SLOW_S = 0.002
"""CPU seconds per mask; a slower output is not waited for during the next tokens."""
BACKOFF = 16
"""Tokens of the first such back-off; it doubles each time."""

T = TypeVar("T")
TOO_SLOW = "its grammar takes too long or too much memory; write an unambiguous one"
NOWHERE = "the grammar allows no further token; give one that can always end"


class Place(NamedTuple):
    """The grammar's state after an output and a path."""

    kind: Kind
    bits: bytearray | None = None
    """The mask's words, not as a tensor: a caller's thread may drop the last reference to a grammar."""


class Asked(NamedTuple):
    """A job in flight, and the data needed to interpret its answer."""

    guide: "weakref.ref[Guide]"
    length: int
    """Length of the output when asked, in tokens."""
    paths: Sequence[Path]


class CompiledGrammar:
    """A compiled grammar. Only the engine's thread may use it.

    Its process works on one frame of jobs at a time; new jobs form the next frame. If a job gets
    the process killed, its output fails, and a new process follows the other outputs once.
    """

    def __init__(
        self, link: Link, first: Place, *, width: int, compile_again: "Callable[[], Future[CompiledGrammar]]"
    ) -> None:
        self.link, self.first = link, first
        self.mask_bytes = 4 * width
        self._compile_again = compile_again
        self._again: Future[CompiledGrammar] | None = None
        self._faults = 0
        """Outputs that got its process killed."""
        self._guides: weakref.WeakSet[Guide] = weakref.WeakSet()
        self._asking: dict[Guide, None] = {}
        self._under_way: deque[Asked] = deque()
        self._sent_s = 0.0
        self._ended: deque[int] = deque()
        """Finished outputs not yet reported to the process."""
        self.numbers = itertools.count()

    def ask(self, guide: "Guide") -> None:
        """Queue a guide's questions, and send them if the process is idle."""
        if guide not in self._guides:
            self._guides.add(guide)
            weakref.finalize(guide, self._ended.append, guide.number).atexit = False
        self._asking[guide] = None
        self._send()

    def take(self, limit_s: float) -> bool:
        """Distribute the answers that have arrived, or wait up to the limit; return whether any came."""
        received = False
        for frame in self.link.frames(limit_s):
            request = self._under_way.popleft()
            if guide := request.guide():
                guide.learn(request, frame)
            received = True
        if self._under_way and time.monotonic() - max(self._sent_s, self.link.heard_s) > GIVEN_UP_S:
            self.link.close()
        if self.link.is_over:
            self._begin_again(0.0 if received else limit_s)
        elif not self._under_way:
            self._send()
        return received

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
        if not self.link.send(marshal.dumps([tuple(job) for job in jobs])):
            self._under_way.clear()  # it had ended before, through no fault of these outputs

    def _begin_again(self, limit_s: float) -> None:
        """Fail the output whose answer is missing, and follow the others in another process."""
        if self._under_way and (guide := self._under_way[0].guide()):
            guide.fail(TOO_SLOW)
            self._faults += 1
        self._under_way.clear()
        guides = [guide for guide in self._guides if not guide.fault]
        if self._faults > FAULTS:
            for guide in guides:
                guide.fail(TOO_SLOW)
            return
        if not guides:
            return
        if self._again is None:
            self._again = self._compile_again()
        if not wait([self._again], limit_s).done:
            return
        recompiling, self._again = self._again, None
        try:
            self.link = recompiling.result().link
        except Exception:
            for guide in guides:
                guide.fail(TOO_SLOW)
            return
        self._ended.clear()
        for guide in guides:
            guide.begin_again()
            self._asking[guide] = None
        self._send()


class Guide:
    """Follow one output and its draft paths through its grammar; the grammar's process computes the masks."""

    field = "structured_outputs"

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self.number = next(grammar.numbers)
        self._taken: list[int] = []
        self._told = 0
        """Number of tokens already sent to the process."""
        self._known: dict[Path, Place] = {(): grammar.first}
        self._wanted: dict[Path, None] = {}
        """Paths asked for but not yet answered."""
        self._unsent: list[Path] = []
        self._patience, self._backoff = 0, BACKOFF
        """Tokens during which no step waits for answers, and the length of the next such back-off."""
        self._fault: str | None = None

    @property
    def fault(self) -> str | None:
        """Return why the output cannot continue, if so."""
        root = self._known.get(())
        return NOWHERE if root and root.kind == Kind.DEAD else self._fault

    @property
    def is_over(self) -> bool:
        root = self._known.get(())
        return root is not None and root.kind == Kind.OVER

    @property
    def is_slow(self) -> bool:
        """Return whether the output is in a back-off after late or slow answers, without drafts."""
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
        """Request the masks after some paths. Ignored after a fault."""
        unknown = [path for path in paths if path not in self._known and path not in self._wanted]
        if self.fault or not unknown:
            return
        self._wanted.update(dict.fromkeys(unknown))
        self._unsent += unknown
        self._grammar.ask(self)

    def wait(self, until_s: float, *, always: bool) -> None:
        """Wait until the deadline for pending answers; in a back-off only poll, unless `always`."""
        while self._wanted and not self.fault:
            waits = (always or not self._patience) and time.monotonic() < until_s
            if not self._grammar.take(until_s - time.monotonic() if waits else 0.0) and not waits:
                break
        if self._wanted and not self.fault:
            self._patience = max(self._patience, 1)

    def observe(self, token: int) -> bool:
        """Advance by an accepted token; drop the paths that do not begin with it."""
        self._taken.append(token)
        self._known = _behind(token, self._known)
        self._wanted = _behind(token, self._wanted)
        self._unsent = [path[1:] for path in self._unsent if path[:1] == (token,)]
        self._patience = max(self._patience - 1, 0)
        return True

    def job(self) -> Job:
        """Return the tokens and paths not yet sent to the process."""
        job = Job(self.number, self._taken[self._told :], self._unsent)
        self._told, self._unsent = len(self._taken), []
        return job

    def learn(self, request: Asked, answer: bytes) -> None:
        """Store an answer, which may be for the output some tokens ago."""
        taken, offset = tuple(self._taken[request.length :]), COST.size
        (took_s,) = COST.unpack_from(answer)
        if took_s > SLOW_S * max(len(request.paths), 1) and not self.is_slow:
            self._patience, self._backoff = self._backoff, 2 * self._backoff
        for path in request.paths:
            kind = Kind(answer[offset])
            words = answer[offset + 1 : offset + 1 + self._grammar.mask_bytes] if kind == Kind.BOUND else b""
            offset += 1 + len(words)
            if path[: len(taken)] == taken:
                self._known[path[len(taken) :]] = place_of(kind, words)
                self._wanted.pop(path[len(taken) :], None)

    def fail(self, fault: str) -> None:
        self._fault = fault
        self._wanted.clear()

    def begin_again(self) -> None:
        """Resend the whole output, to another process."""
        self._told, self._unsent = 0, list(self._wanted)


def place_of(kind: Kind, words: bytes) -> Place:
    return Place(kind, bytearray(words) if words else None)


def _behind(token: int, paths: Mapping[Path, T]) -> dict[Path, T]:
    """Return the paths that begin with a token, with it removed."""
    return {path[1:]: own for path, own in paths.items() if path[:1] == (token,)}
