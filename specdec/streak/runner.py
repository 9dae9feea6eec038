"""When steps are decided on the device, and what comes of them on the host."""

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence

from specdec.counts import Clock, Counts
from specdec.draft.policy import WIDTHS
from specdec.draft.proposal import Shape
from specdec.draft.uniform import UniformPolicy
from specdec.parts import Part
from specdec.request import Request
from specdec.scheduler import Scheduler, Share
from specdec.speculation import Speculation
from specdec.state_slots.backing import Draft
from specdec.state_slots.tree import TokenTree
from specdec.streak.form import Form
from specdec.streak.result import Outcome
from specdec.streak.streak import Streak
from specdec.verify.choose import NO_TOKEN
from specdec.verify.walk import AcceptedPath

Emit = Callable[[Part, AcceptedPath, dict[str, float]], None]
"""Gives a request its tokens, after seconds by phase."""


class Runner(ABC):
    """Begins a streak when every running request decodes; ends it when any comes, ends or is cancelled."""

    def __init__(
        self, streak: Streak, scheduler: Scheduler, speculation: Speculation, counts: Counts, emit: Emit
    ) -> None:
        self.streak, self.counts, self.emit = streak, counts, emit
        self.scheduler, self.speculation = scheduler, speculation
        self.steps = 0
        """Steps that were read."""
        self._waiting = 0
        self._over = False

    @abstractmethod
    def forms(self) -> list[Form]:
        """List what steps may be made for, so that it can be captured."""

    @abstractmethod
    def _start(self) -> None:
        """Make the rows that were just loaded ready for a first step."""

    @abstractmethod
    def _advance(self) -> bool:
        """Run a step; tell whether there was memory for it."""

    @abstractmethod
    def _drain(self) -> None:
        """Read what is still under way."""

    def begin(self, shares: Sequence[Share]) -> bool:
        """Take over a step that is the device's to decide; tell whether this was one."""
        requests = [share.request for share in shares]
        if len(requests) != len(self.scheduler.running) or not all(map(self._suits, requests)):
            return False
        if not self.streak.begin(requests):
            return False
        self._waiting, self._over = len(self.scheduler.waiting), False
        self._run(first=True)
        return True

    def go_on(self) -> bool:
        """Advance the streak that is under way by a step; False: there is none, or no more."""
        if not self.streak.held:
            return False
        if len(self.scheduler.waiting) != self._waiting or self._is_cancelled():
            self._over = True
        self._run()
        return True

    def _run(self, *, first: bool = False) -> None:
        try:
            if first:
                self._start()
            if self._over or not self._advance() or self._over:
                self._drain()
                self.streak.end()
        except BaseException:
            self.streak.abandon()
            raise

    def _suits(self, request: Request) -> bool:
        return request.decodes and request.chooser.is_static and not self.speculation.is_distrusted(request)

    def _is_cancelled(self) -> bool:
        return any(r.cancelled for r in (*self.scheduler.running, *self.scheduler.waiting))

    def _take(self, request: Request, outcome: Outcome, seconds: dict[str, float], *, drafted: bool) -> None:
        """Give a request what a step made for it."""
        path = AcceptedPath(outcome.nodes, outcome.emitted)
        if not outcome.nodes and drafted:
            # Its numbers may be NaN for a rejected branch's sake: the token is tried again without a draft.
            self.speculation.distrust(request)
            self._over = True
            return
        if not outcome.nodes:
            path = AcceptedPath((0,), (NO_TOKEN,))
        draft = Draft(outcome.tree, ()) if drafted else None
        self.emit(Part(request, outcome.tree, draft, True, ()), path, seconds)
        self._over = self._over or request.finish_reason is not None


class Pipeline(Runner):
    """The device drafts too, if anybody does: a step is launched before the one before it has been read."""

    def __init__(self, policy: UniformPolicy, *base: object) -> None:
        super().__init__(*base)  # type: ignore[arg-type]
        self.policy = policy
        self._mark_s: float | None = None
        """When the last result came; None: none has."""
        self._shape: Shape | None = None
        """That of the windows that are verified next."""

    def forms(self) -> list[Form]:
        """List every shape that may be chosen."""
        return [Form.drafting(shape, greedy=self.streak.greedy) for shape in self.policy.shapes]

    def _start(self) -> None:
        self._mark_s, self._shape = None, self._choose()
        self.streak.prime(Form.drafting(self._shape, greedy=self.streak.greedy))

    def _choose(self) -> Shape | None:
        return self.policy.choose([self.speculation.track_of(own) for own in self.streak.requests])

    def _advance(self) -> bool:
        shape = self._choose()
        form = Form.drafting(shape, greedy=self.streak.greedy)
        launched = self.streak.launch(form, as_drafted=shape == self._shape)
        self._shape = shape
        if self.streak.is_full:
            self._read()
        return launched

    def _drain(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        read = self.streak.read()
        if read is None:
            return False
        now_s, before_s = time.perf_counter(), self._mark_s
        self._mark_s = now_s
        self.steps += 1
        seconds = {"whole": 0.0 if before_s is None else now_s - before_s}
        self.counts.spend(seconds)
        if before_s is not None and read.as_drafted and not self._over:
            self.policy.observe(read.form.shape, len(read.came), seconds["whole"])
        for request, outcome in read.came:
            self.speculation.propose(request, read.form.shape if read.as_drafted else None, outcome.proposal)
            self._take(request, outcome, seconds, drafted=read.form.nodes > 1)
        return True


class Stepwise(Runner):
    """The host drafts, for which it must have read the step before."""

    def __init__(self, widest: int, *base: object) -> None:
        super().__init__(*base)  # type: ignore[arg-type]
        self._sizes = sorted({1, *(1 + nodes for nodes in WIDTHS if 1 + nodes < widest), widest})

    def forms(self) -> list[Form]:
        """List windows of the widths that are tried."""
        return [Form.given(nodes, greedy=self.streak.greedy) for nodes in self._sizes]

    def _start(self) -> None:
        """Have nothing to do: the windows come with each step."""

    def _drain(self) -> None:
        """Have nothing to read: every step was."""

    def _advance(self) -> bool:
        requests, clock = self.streak.requests, Clock()
        drafts = self.speculation.draft([Share(request, 1) for request in requests], lend=lambda *_: ())
        trees = [
            d.tree if d else TokenTree((r.tokens[-1],), (-1,)) for r, d in zip(requests, drafts, strict=True)
        ]
        clock.lap("draft")
        nodes = self._sizes[bisect_left(self._sizes, max(map(len, trees)))]
        if not self.streak.launch(Form.given(nodes, greedy=self.streak.greedy), trees=trees):
            return False
        read = self.streak.read()
        assert read is not None
        clock.lap("whole")
        self.steps += 1
        self.counts.spend(clock.seconds)
        if self.speculation.head:
            for row, (request, outcome) in enumerate(read.came):
                self.speculation.head.read(request.number, self.streak.hidden(row, len(outcome.nodes)))
        parts = [Part(r, tree, d, True, ()) for r, tree, d in zip(requests, trees, drafts, strict=True)]
        for part, (request, outcome) in zip(parts, read.came, strict=True):
            self._take(request, outcome, clock.seconds, drafted=part.draft is not None)
        self.speculation.observe_step(parts, clock.seconds)
        return True
