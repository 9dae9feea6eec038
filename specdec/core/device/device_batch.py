"""A batch decoded on the device: the host loads it, launches steps, reads results and unloads it.

While a step runs, the host processes the previous one. So a sequence ends one step late, and the extra step's
output is dropped. Its memory is released immediately: later writes to it are operations on the same device,
which run in order.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from specdec.core.batch import InFlightSteps
from specdec.core.device.extent import IN_FLIGHT, Extent
from specdec.core.device.graph_key import GraphKey
from specdec.core.device.loading import RowSlots, fill, ids, load, load_blocks, load_trees
from specdec.core.device.result import PendingResult, RowResult
from specdec.core.device.rows import BatchRows
from specdec.core.device.step import DeviceStep
from specdec.core.device.steps import Steps
from specdec.core.draft_record import want_of
from specdec.core.request import Request
from specdec.core.scheduler import DEVICE_SLOTS, Scheduler
from specdec.draft.head import HeadDrafter
from specdec.kernels.table import on_gpu
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import RecordSlot


class BatchOutput(NamedTuple):
    """Results of a step for the requests that still run."""

    key: GraphKey
    as_drafted: bool
    """Whether its windows were drafted in the step's own shape."""
    requests: list[Request]
    outcomes: list[RowResult]
    committed: list[CommittedState | None]
    ahead: InFlightSteps | None
    """None: no step is in flight, and the head did not run on the device."""


class DeviceBatch:
    """Owns the device rows of a decoding batch. One batch at a time; between batches it holds nothing."""

    def __init__(
        self,
        step: DeviceStep,
        rows: BatchRows,
        extent: Extent,
        steps: Steps,
        arena: Arena,
        scheduler: Scheduler,
        head: HeadDrafter | None,
    ) -> None:
        self.step, self.rows, self.extent, self.steps = step, rows, extent, steps
        self.arena, self.scheduler, self.head = arena, scheduler, head
        self.in_flight = IN_FLIGHT if rows.length_B.is_cuda else 1
        """Maximum steps in flight; the host waits for the oldest."""
        self.held: list[RowSlots] = []
        self.reads = False
        """Whether the head runs on the device; else its pending hidden states stay on the host."""
        self.drafts = True
        """Whether windows may contain drafts."""
        self.on_gpu = on_gpu(step.kernels.name)
        self.filtered = self.on_gpu
        self._pending: deque[PendingResult] = deque()

    @property
    def requests(self) -> list[Request]:
        """Return the requests that still decode."""
        return [held.request for held in self.held if held.request.finish_reason is None]

    def begin(self, requests: Sequence[Request], *, reads: bool, drafts: bool) -> bool:
        """Load decoding requests; return False without memory, or if the head has too much to catch up.

        Without `drafts`, no draft slots are borrowed, and windows hold one token until `end`.
        """
        self.reads, self.drafts = reads and self.head is not None, drafts
        draft_requests = [want_of(request, None) for request in requests] if self.reads else []
        if draft_requests and self.head and not self.head.catch_up_to(draft_requests, most=self.extent.path):
            return False
        for request in requests:
            held = self._borrow(request) if drafts else RowSlots(request, (), ())
            if held is None or not self._reserve(request):
                self.scheduler.limited_by[DEVICE_SLOTS] += 1
                for slots in (*self.held, *filter(None, [held])):
                    self._release(slots, ())
                self.held.clear()
                return False
            self.held.append(held)
        # GPU graphs always include filters; on a CPU they run only if a request needs them.
        self.filtered = self.on_gpu or any(r.chooser.rule.is_filtered for r in requests)
        load(self.rows, self.extent, self.held)
        load_blocks(self.rows, self.held)
        if self.head and self.step.drafter:
            self.step.drafter.calibrate(self.head.calibrator.table())
        return True

    def launch(
        self, key: GraphKey, *, trees: Sequence[TokenTree | None] = (), as_drafted: bool = True
    ) -> bool:
        """Launch a step over the drafted windows or over `trees`; return False if blocks are missing."""
        assert key.nodes == 1 or self.drafts, "no slots were borrowed for drafts"
        self._drop_ended()
        if not all(self._reserve(held.request) for held in self.held if not held.gone):
            return False
        load_blocks(self.rows, self.held)
        if any(trees):
            load_trees(self.rows, trees, key.nodes)
        result_BX = self.steps(key, self.steps.size(len(self.held)))
        self._pending.append(PendingResult.send(key, result_BX, as_drafted=as_drafted))
        return True

    @property
    def is_full(self) -> bool:
        """Whether a result must be read before the next launch."""
        return len(self._pending) >= self.in_flight

    def read(self) -> BatchOutput | None:
        """Wait for the oldest step and update each row's slots as the device did; None: no step in flight.

        Requests that have already finished are left out.
        """
        if not self._pending:
            return None
        pending = self._pending.popleft()
        pending.wait()
        running = [b for b, held in enumerate(self.held) if held.request.finish_reason is None]
        outcomes = list(pending.outcomes(running))
        committed = [
            self._committed(self.held[b], pending.key, outcome)
            for b, outcome in zip(running, outcomes, strict=True)
        ]
        requests = [self.held[b].request for b in running]
        if self.head and not self.reads:
            for b, request, outcome in zip(running, requests, outcomes, strict=True):
                if outcome.nodes:
                    self.head.read(request.number, self.rows.hidden_BPD[b, : len(outcome.nodes)])
        ahead = None
        if self._pending or self.reads:
            # A step without drafts always processes exactly one token per row.
            alone = all(step.key.nodes == 1 for step in self._pending)
            ahead = InFlightSteps(len(self._pending), alone * len(self._pending))
        return BatchOutput(pending.key, pending.as_drafted, requests, outcomes, committed, ahead)

    def end(self) -> None:
        """Return every request to the host after the last step; all results must have been read."""
        assert not self._pending
        for i, held in enumerate(self.held):
            if held.request.finish_reason is None:
                self._unload(i, held)
        self._forget()

    def abandon(self) -> None:
        """Drop the batch after a failed step: its requests end, which frees their memory."""
        self._pending.clear()
        self._forget()

    def prefill_drafter(self, key: GraphKey) -> None:
        """Draft the first windows: run the head on every request's pending hidden states."""
        if self.head is None or not self.reads:
            return
        rows, size = self.rows, self.steps.size(len(self.held))
        starts, counts = [0] * size, [0] * size
        for b, held in enumerate(self.held):
            request = held.request
            starts[b], hidden_MD = self.head.take_pending(request.number)
            counts[b] = len(hidden_MD)
            assert starts[b] + counts[b] == request.num_computed_tokens
            rows.hidden_BPD[b, : counts[b]] = hidden_MD
            follows = request.tokens[starts[b] + 1 : request.num_computed_tokens + 1]
            rows.follows_BP[b, : counts[b]].copy_(ids(follows, rows.follows_BP.device))
        fill(rows.start_B, starts)
        fill(rows.count_B, counts)
        self.steps.prefill_drafter(key, size)

    def _forget(self) -> None:
        self.rows.part(0, self.steps.size(len(self.held))).clear()
        self.held.clear()

    def _reserve(self, request: Request) -> bool:
        return self.scheduler.reserve(request, request.num_computed_tokens + self.extent.ahead)

    def _drop_ended(self) -> None:
        """Turn rows of finished requests into padding: their memory may already belong to others."""
        over = [
            b for b, held in enumerate(self.held) if not held.gone and held.request.finish_reason is not None
        ]
        if over:
            self.rows.drop(ids(over, self.rows.length_B.device))
        for b in over:
            self.held[b].gone = True

    def _committed(self, held: RowSlots, key: GraphKey, outcome: RowResult) -> CommittedState | None:
        """Compute a row's committed state, tracking the device's slot exchange."""
        before, nodes = held.request.committed, outcome.nodes
        if before is None:
            return None
        state, path = before.state, tuple[RecordSlot, ...]()
        if key.nodes > 1 and held.sets:
            slots = held.sets[0]
            path = tuple(slots[node] for node in nodes)
            held.sets = held.sets[::-1]
        elif key.nodes > 1 and nodes:
            state, held.snapshots[nodes[-1]] = held.snapshots[nodes[-1]], state
        return CommittedState(state, path)

    def _borrow(self, request: Request) -> RowSlots | None:
        """Borrow record slots for two windows, or state slots for one; None if there are too few."""
        nodes = self.extent.nodes
        if request.committed is None or nodes == 1:
            return RowSlots(request, (), ())
        if self.step.snapshots:
            states = self.arena.take_snapshots(request.number, nodes)
            return None if states is None else RowSlots(request, (), states)
        records = self.arena.take_records(request.number, 2 * nodes)
        return None if records is None else RowSlots(request, (records[:nodes], records[nodes:]), ())

    def _release(self, held: RowSlots, kept: Sequence[RecordSlot]) -> None:
        number = held.request.number
        released = [slot for slots in held.sets for slot in slots if slot not in kept]
        if released:
            self.arena.release_records(number, released)
        for state in held.snapshots:
            self.arena.release_state(number, state)

    def _unload(self, row: int, held: RowSlots) -> None:
        request = held.request
        if request.committed is not None:
            kept = request.committed.path
            if held.before and held.before.path and held.before.path != kept:
                self.arena.release_records(request.number, held.before.path)
            self._release(held, kept)
        if self.head and self.reads:
            self.head.restore(
                request.number, request.num_computed_tokens - 1, self.rows.last_BD[row : row + 1].clone()
            )
