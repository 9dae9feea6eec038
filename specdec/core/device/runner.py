"""When steps are decided on the device, and what comes of them on the host."""

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.core.batch import ScheduledRequest, StepResult
from specdec.core.device.device_batch import DeviceBatch, Output
from specdec.core.device.graph_key import GraphKey
from specdec.core.device.result import Outcome
from specdec.core.request import Request
from specdec.core.scheduler import Scheduler
from specdec.core.speculator import Speculation
from specdec.core.stats import Clock, Counts
from specdec.draft.outlook import Outlook
from specdec.draft.proposal import Shape
from specdec.draft.uniform import UniformPolicy
from specdec.draft.widths import WIDTHS
from specdec.kernels.sampling.rules import NO_TOKEN
from specdec.state_slots.tree import TokenTree
from specdec.verify.walk import AcceptedPath

Commit = Callable[[StepResult], Sequence[Request]]
"""Gives requests what a step made for them; returns those that are over."""

FEWEST = 0.5
"""Part of the rows below which those that are left are loaded anew, as a smaller batch."""


@dataclass(frozen=True, slots=True)
class Host:
    """What of the loop a runner works with."""

    scheduler: Scheduler
    speculation: Speculation
    counts: Counts
    commit: Commit


class Runner(ABC):
    """Hands requests to the device when all decode; takes them back when the host has a plan to make."""

    def __init__(self, batch: DeviceBatch, host: Host) -> None:
        self.batch, self.host = batch, host
        self.steps = 0
        """Steps that were read."""
        self._waiting = 0
        self._over = False

    @property
    def outlook(self) -> Outlook | None:
        """Which drafts run now and why, where that is decided for steps of the device."""
        return None

    @abstractmethod
    def graph_keys(self) -> list[GraphKey]:
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

    def begin(self, rows: Sequence[ScheduledRequest]) -> bool:
        """Take over a step that is the device's to decide; tell whether this was one."""
        requests = [row.request for row in rows]
        if len(requests) != len(self.host.scheduler.running) or not all(map(self._suits, requests)):
            return False
        self._waiting, self._over = len(self.host.scheduler.waiting), False
        return self.batch.begin(requests) and self._run(first=True)

    def go_on(self) -> bool:
        """Advance the batch that is on the device by a step; False: there is none, or no more."""
        if not self.batch.held:
            return False
        self._over = self._over or self._is_interrupted()
        return self._run()

    def abandon(self) -> None:
        """Forget the batch after a step that failed."""
        self.batch.abandon()

    def _run(self, *, first: bool = False) -> bool:
        """Run a step, and take the batch back after its last; tell whether a step was run."""
        if first:
            self._start()
        advanced = not self._over and self._advance()
        if self._over or not advanced or len(self.batch.requests) <= FEWEST * len(self.batch.held):
            self._drain()
            self.batch.end()
        return advanced

    def _suits(self, request: Request) -> bool:
        skips_draft = self.host.speculation.skips_draft(request)
        return request.is_decoding and request.chooser.runs_on_device and not skips_draft

    def _is_interrupted(self) -> bool:
        """Tell whether a request has come that may be admitted, or was cancelled."""
        scheduler = self.host.scheduler
        came = len(scheduler.waiting) != self._waiting and len(scheduler.running) < scheduler.max_running
        return came or any(r.cancelled for r in (*scheduler.running, *scheduler.waiting))

    def _commit(self, read: Output, seconds: dict[str, float]) -> None:
        """Give requests what a step made for them."""
        self.steps += 1
        self.host.counts.spend(seconds)
        rows = [_row(*own) for own in zip(read.requests, read.outcomes, strict=True)]
        paths = [self._path(*own, read.key) for own in zip(read.requests, read.outcomes, strict=True)]
        result = StepResult(rows, paths, read.committed, seconds, ahead=read.ahead)
        # What those held that are over may let others in.
        self._over |= bool(self.host.commit(result)) and bool(self.host.scheduler.waiting)

    def _path(self, request: Request, outcome: Outcome, key: GraphKey) -> AcceptedPath:
        """Return the path that the device has accepted: none where the numbers were NaN at the root."""
        if outcome.nodes:
            return AcceptedPath(outcome.nodes, outcome.emitted)
        if key.nodes == 1:
            return AcceptedPath((0,), (NO_TOKEN,))
        # They may be NaN for another node's sake: the token is tried again without any.
        self.host.speculation.skip_draft_once(request)
        self._over = True
        return AcceptedPath((), ())


def _row(request: Request, outcome: Outcome) -> ScheduledRequest:
    """Make the row of a step that is over: what a draft borrowed the device has given back."""
    slots = () if len(outcome.tree) > 1 else None
    return ScheduledRequest(request, outcome.tree, is_decode=True, slots=slots)


class DeviceDraftRunner(Runner):
    """The device drafts too, if there is a head: a step is launched before the last one has been read."""

    def __init__(self, batch: DeviceBatch, host: Host, policy: UniformPolicy) -> None:
        super().__init__(batch, host)
        self.policy = policy
        self._mark_s: float | None = None
        """When the last result came; None: none has."""
        self._shape: Shape | None = None
        """That of the windows that are verified next."""
        self._next: tuple[Shape | None] | None = None
        """The shape of the first step, chosen before its windows were drafted."""

    def begin(self, rows: Sequence[ScheduledRequest]) -> bool:
        """Leave to the host what no one shape serves: rows that are drafted for beside rows that must not."""
        drafts = {row.request.params.speculate for row in rows} if self.policy.bounds else ()
        return len(drafts) < 2 and super().begin(rows)

    def graph_keys(self) -> list[GraphKey]:
        """List every shape that may be chosen, and none, which requests may ask for."""
        shapes = dict.fromkeys((None, *self.policy.shapes))
        return [GraphKey.drafting(shape, filtered=self.batch.filtered) for shape in shapes]

    @property
    def outlook(self) -> Outlook | None:
        return self.policy.outlook

    def _start(self) -> None:
        self._mark_s, self._shape = None, self._choose()
        self._next = (self._shape,)
        self.batch.prefill_drafter(GraphKey.drafting(self._shape, filtered=self.batch.filtered))

    def _choose(self) -> Shape | None:
        if not all(own.params.speculate for own in self.batch.requests):
            return None
        return self.policy.choose([self.host.speculation.records.of(own) for own in self.batch.requests])

    def _advance(self) -> bool:
        (shape,) = self._next or (self._choose(),)
        self._next = None
        key = GraphKey.drafting(shape, filtered=self.batch.filtered)
        launched = self.batch.launch(key, as_drafted=shape == self._shape)
        self._shape = shape
        if launched and self.batch.is_full:
            self._read()
        return launched

    def _drain(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        read = self.batch.read()
        if read is None:
            return False
        now_s, before_s = time.perf_counter(), self._mark_s
        self._mark_s = now_s
        seconds = {"whole": 0.0 if before_s is None else now_s - before_s}
        if before_s is not None and read.as_drafted and read.requests:
            self.policy.observe(read.key.shape, len(read.requests), seconds["whole"])
        shape = read.key.shape if read.as_drafted else None
        for request, outcome in zip(read.requests, read.outcomes, strict=True):
            self.host.speculation.propose(request, shape, outcome.proposal)
        self._commit(read, seconds)
        return True


class HostDraftRunner(Runner):
    """The host looks drafts up, for which it must have read the step before."""

    def __init__(self, batch: DeviceBatch, host: Host) -> None:
        super().__init__(batch, host)
        widest = batch.extent.nodes
        self._sizes = sorted({1, *(1 + nodes for nodes in WIDTHS if 1 + nodes < widest), widest})

    def graph_keys(self) -> list[GraphKey]:
        """List windows of the widths that are tried."""
        return [GraphKey.given(nodes, filtered=self.batch.filtered) for nodes in self._sizes]

    def _start(self) -> None:
        """Have nothing to do: the windows come with each step."""

    def _drain(self) -> None:
        """Have nothing to read: every step was."""

    def _advance(self) -> bool:
        clock, speculation = Clock(), self.host.speculation
        rows = [ScheduledRequest.of(request, 1) for request in self.batch.requests]
        drafts = speculation.draft(rows, lend=lambda *_: ())
        rows = [row.with_draft(draft) for row, draft in zip(rows, drafts, strict=True)]
        known = {row.request: row.tree for row in rows}
        padding = TokenTree((0,), (-1,))
        trees = [known.get(held.request, padding) for held in self.batch.held]
        clock.lap("draft")
        key = GraphKey.given(
            self._sizes[bisect_left(self._sizes, max(map(len, trees)))], filtered=self.batch.filtered
        )
        if not self.batch.launch(key, trees=trees):
            return False
        read = self.batch.read()
        assert read is not None
        clock.lap("whole")
        self._commit(read, clock.seconds)
        speculation.observe_step(rows)
        return True
