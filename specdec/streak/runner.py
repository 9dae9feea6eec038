"""When steps are decided on the device, in which shape, and what comes of them on the host."""

import time
from collections.abc import Callable, Sequence

from specdec.counts import Counts
from specdec.draft.proposal import Shape
from specdec.draft.uniform import UniformPolicy
from specdec.parts import Part
from specdec.request import Request
from specdec.scheduler import Scheduler, Share
from specdec.speculation import Speculation
from specdec.state_slots.backing import Draft
from specdec.streak.form import Form
from specdec.streak.result import Outcome
from specdec.streak.streak import Streak
from specdec.verify.choose import NO_TOKEN
from specdec.verify.walk import AcceptedPath

Emit = Callable[[Part, AcceptedPath, float], None]
"""Gives a request its tokens, after so many seconds."""


class Runner:
    """Begins a streak when every running request decodes; ends it when any comes, ends or is cancelled."""

    def __init__(
        self,
        streak: Streak,
        policy: UniformPolicy,
        scheduler: Scheduler,
        speculation: Speculation,
        counts: Counts,
        emit: Emit,
    ) -> None:
        self.streak, self.policy, self.counts, self.emit = streak, policy, counts, emit
        self.scheduler, self.speculation = scheduler, speculation
        self.steps = 0
        """Steps that were read."""
        self._waiting = 0
        self._mark_s: float | None = None
        """When the last result came; None: none has."""
        self._over = False

    def begin(self, shares: Sequence[Share]) -> bool:
        """Take over a step that is the device's to decide; tell whether this was one."""
        requests = [share.request for share in shares]
        if len(requests) != len(self.scheduler.running) or not all(map(self._suits, requests)):
            return False
        shape = self._shape(requests)
        if not self.streak.begin(requests, shape):
            return False
        self._waiting, self._mark_s, self._over = len(self.scheduler.waiting), None, False
        self._advance(shape)
        return True

    def go_on(self) -> bool:
        """Advance the streak that is under way by a step; False: there is none, or no more."""
        if not self.streak.held:
            return False
        if len(self.scheduler.waiting) != self._waiting or self._is_cancelled():
            self._finish()
            return False
        self._advance(self._shape(self.streak.requests))
        return True

    def _suits(self, request: Request) -> bool:
        return request.decodes and request.chooser.is_static and not self.speculation.is_distrusted(request)

    def _shape(self, requests: Sequence[Request]) -> Shape | None:
        return self.policy.choose([self.speculation.track_of(request) for request in requests])

    def _is_cancelled(self) -> bool:
        return any(r.cancelled for r in (*self.scheduler.running, *self.scheduler.waiting))

    def _advance(self, shape: Shape | None) -> None:
        try:
            launched = self.streak.launch(shape)
            if self.streak.is_full:
                self._read()
            if self._over or not launched:
                self._finish()
        except BaseException:
            self.streak.abandon()
            raise

    def _finish(self) -> None:
        """Read what is under way and hand the requests back."""
        while self._read():
            pass
        self.streak.end()

    def _read(self) -> bool:
        read = self.streak.read()
        if read is None:
            return False
        now_s, before_s = time.perf_counter(), self._mark_s
        self._mark_s = now_s
        self.steps += 1
        took_s = 0.0 if before_s is None else now_s - before_s
        self.counts.spend({"whole": took_s})
        if before_s is not None and read.as_drafted and not self._over:
            self.policy.observe(read.form.shape, len(read.came), took_s)
        for request, outcome in read.came:
            self._take(request, outcome, read.form, took_s, learn=read.as_drafted)
        return True

    def _take(self, request: Request, outcome: Outcome, form: Form, took_s: float, *, learn: bool) -> None:
        """Give a request what a step made for it."""
        path = AcceptedPath(outcome.nodes, outcome.emitted)
        if not outcome.nodes:
            self._over = True
            if form.nodes > 1:
                # Its numbers may be NaN for a rejected branch's sake: the host tries the token again alone.
                self.speculation.distrust(request)
                return
            path = AcceptedPath((0,), (NO_TOKEN,))
        self.speculation.propose(request, form.shape if learn else None, outcome.proposal)
        draft = Draft(outcome.tree, ()) if form.nodes > 1 else None
        self.emit(Part(request, outcome.tree, draft, True, ()), path, took_s)
        self._over = self._over or request.finish_reason is not None
