"""A batch whose steps decide on the device: the host loads it, launches steps, reads what came, unloads it.

While a step runs the host deals with the one before it. So a text ends one step late: what was computed for
it meanwhile is thrown away.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.draft.head import HeadDrafter
from specdec.request import Request
from specdec.scheduler import Scheduler
from specdec.speculation import want_of
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import Committed
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import RecordSlot
from specdec.streak.extent import IN_FLIGHT, Extent
from specdec.streak.form import Form
from specdec.streak.result import Outcome, Pending
from specdec.streak.rows import NO_TOKEN, Rows
from specdec.streak.step import DeviceStep

Run = Callable[[Form, int], Tensor]
"""Runs a step of a form over the first rows; captured or not."""


def run_as_it_stands(step: DeviceStep, rows: Rows, form: Form, count: int) -> Tensor:
    """Run a step uncaptured."""
    return step(rows.part(0, count), form)


class Came(NamedTuple):
    """What a step gave to the requests that still wanted it."""

    form: Form
    as_drafted: bool
    """Whether its windows had been drafted in its own shape."""
    came: list[tuple[Request, Outcome]]


class Held:
    """What one request lends to a streak."""

    def __init__(
        self, request: Request, sets: tuple[Sequence[RecordSlot], ...], snapshots: Sequence[int]
    ) -> None:
        self.request, self.sets, self.snapshots = request, sets, list(snapshots)
        self.before = request.committed
        """What it had committed when it came; its path's records are given back in the end."""
        self.blocks = 0
        """Blocks of its table that the device knows."""


class Streak:
    """Owns the rows on the device while they decode. One at a time; between two of them it holds nothing."""

    def __init__(
        self,
        step: DeviceStep,
        rows: Rows,
        extent: Extent,
        run: Run,
        arena: Arena,
        scheduler: Scheduler,
        head: HeadDrafter | None,
    ) -> None:
        self.step, self.rows, self.extent, self.run = step, rows, extent, run
        self.arena, self.scheduler, self.head = arena, scheduler, head
        self.held: list[Held] = []
        self.greedy = False
        self._pending: deque[Pending] = deque()

    @property
    def requests(self) -> list[Request]:
        return [held.request for held in self.held]

    def begin(self, requests: Sequence[Request]) -> bool:
        """Load requests that all decode; tell whether there was room, and the head is near enough."""
        if self.head and not self.head.settle([want_of(r, None) for r in requests], most=self.extent.path):
            return False
        for request in requests:
            held = self._borrow(request)
            if held is None:
                self.scheduler.limited_by["slots of steps on the device"] += 1
                self._give_back_loans()
                return False
            self.held.append(held)
        # One graph serves every rule, and each row looks up its own; elsewhere no noise is made for nothing.
        self.greedy = self.step.pack.asks and all(r.params.temperature == 0 for r in requests)
        self._load()
        return True

    def launch(self, form: Form, *, trees: Sequence[TokenTree] = (), as_drafted: bool = True) -> bool:
        """Start a step, of the windows that were drafted or of these; False: there are no blocks for it."""
        for held in self.held:
            if not self.scheduler.reserve(held.request, held.request.computed + self.extent.ahead):
                return False
        self._load_blocks()
        if trees:
            self._load_trees(trees, form.nodes)
        result_BX = self.run(form, len(self.held))
        self._pending.append(Pending.send(form, result_BX, as_drafted=as_drafted))
        return True

    def hidden(self, row: int, count: int) -> Tensor:
        """Return the hidden states of what a row's last step has committed."""
        return self.rows.hidden_BPD[row, :count].clone()

    @property
    def is_full(self) -> bool:
        """Whether a result should be read before another step is launched."""
        return len(self._pending) >= IN_FLIGHT

    def read(self) -> Came | None:
        """Wait for the oldest step and note what its requests have committed; None: none is under way.

        Requests that have ended before are left out.
        """
        if not self._pending:
            return None
        pending = self._pending.popleft()
        pending.wait()
        came = []
        for held, outcome in zip(self.held, pending.outcomes(), strict=False):
            if held.request.finish_reason is None:
                self._note(held, pending.form, outcome)
                came.append((held.request, outcome))
        return Came(pending.form, pending.as_drafted, came)

    def end(self) -> None:
        """Hand every request back to the host as the last step left it; the results have been read."""
        assert not self._pending
        for i, held in enumerate(self.held):
            if held.request.finish_reason is None:
                self._unload(i, held)
        self._forget()

    def abandon(self) -> None:
        """Forget everything after a step that failed: its requests end, and their memory goes with them."""
        self._pending.clear()
        self._forget()

    def _forget(self) -> None:
        self.held.clear()
        self.rows.clear()

    def _note(self, held: Held, form: Form, outcome: Outcome) -> None:
        """Follow on the host what the device did with a row's slots."""
        request, nodes = held.request, outcome.nodes
        request.computed += len(nodes)
        if request.committed is None:
            return
        state, path = request.committed.state, tuple[RecordSlot, ...]()
        if form.nodes > 1 and held.sets:
            own = held.sets[0]
            path = tuple(own[node] for node in nodes)
            held.sets = held.sets[::-1]
        elif form.nodes > 1 and nodes:
            state, held.snapshots[nodes[-1]] = held.snapshots[nodes[-1]], state
        request.committed = Committed(state, path)

    def _borrow(self, request: Request) -> Held | None:
        """Take the slots of two windows' records, or of one's states."""
        nodes = self.extent.nodes
        if request.committed is None or nodes == 1:
            return Held(request, (), ())
        if self.step.snapshots:
            states = self.arena.take_snapshots(request.number, nodes)
            return None if states is None else Held(request, (), states)
        records = self.arena.take_records(request.number, 2 * nodes)
        return None if records is None else Held(request, (records[:nodes], records[nodes:]), ())

    def _give_back_loans(self) -> None:
        for held in self.held:
            self._release(held, ())
        self.held.clear()

    def _release(self, held: Held, kept: Sequence[RecordSlot]) -> None:
        number = held.request.number
        lent = [slot for own in held.sets for slot in own if slot not in kept]
        if lent:
            self.arena.release_records(number, lent)
        for state in held.snapshots:
            self.arena.release_state(number, state)

    def _unload(self, row: int, held: Held) -> None:
        request = held.request
        if request.committed is not None:
            kept = request.committed.path
            if held.before and held.before.path and held.before.path != kept:
                self.arena.release_records(request.number, held.before.path)
            self._release(held, kept)
        if self.head:
            self.head.resume(request.number, request.computed - 1, self.rows.last_BD[row : row + 1].clone())

    def _load(self) -> None:
        """Put every request's part into the rows' tensors."""
        rows, requests = self.rows, self.requests
        committed = [r.committed or Committed(0) for r in requests]
        _fill(rows.length_B, [r.computed for r in requests])
        _fill(rows.token_BM[:, 0], [r.tokens[-1] for r in requests])
        _fill(rows.seed_B, [r.chooser.seed for r in requests])
        _fill(rows.temperature_B, [r.params.temperature for r in requests])
        _fill(rows.top_k_B, [min(max(r.params.top_k, 0), 2**31) for r in requests])
        _fill(rows.top_p_B, [r.params.top_p for r in requests])
        _fill(rows.min_p_B, [r.params.min_p for r in requests])
        _fill(rows.state_B, [own.state for own in committed])
        _fill(rows.path_length_B, [len(own.path) for own in committed])
        unused = [(0, 0)] * self.extent.nodes
        paths = [[*own.path, *unused[: self.extent.path - len(own.path)]] for own in committed]
        for i, (path_BP, sets_2BM) in enumerate(
            ((rows.path_slab_BP, rows.slab_2BM), (rows.path_place_BP, rows.place_2BM))
        ):
            _fill(path_BP, [[slot[i] for slot in path] for path in paths])
            for which, set_BM in enumerate(sets_2BM):
                own_sets = [held.sets[which] if held.sets else unused for held in self.held]
                _fill(set_BM, [[slot[i] for slot in own] for own in own_sets])
        _fill(rows.snapshot_BM, [held.snapshots or [0] * self.extent.nodes for held in self.held])
        self._load_blocks()
        if self.head:
            table = self.head.calibrator.table()
            rows.table_3DR.copy_(torch.tensor(table, dtype=torch.float64))

    def _load_blocks(self) -> None:
        """Tell the device of the blocks that it does not know yet."""
        width = self.rows.table_BN.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for b, held in enumerate(self.held):
            table = held.request.table_N[held.blocks :].tolist()
            places += range(b * width + held.blocks, b * width + held.blocks + len(table))
            blocks += table
            held.blocks += len(table)
        if places:
            device = self.rows.table_BN.device
            flat = self.rows.table_BN.view(-1)
            flat[torch.tensor(places, device=device)] = torch.tensor(blocks, device=device)

    def _load_trees(self, trees: Sequence[TokenTree], nodes: int) -> None:
        """Make trees the next windows, filled up with chains of no tokens."""
        fill = range(nodes)
        _fill(self.rows.token_BM[:, :nodes], [[*t.tokens, *[NO_TOKEN] * (nodes - len(t))] for t in trees])
        parents = [[*t.parents, *(i - 1 for i in fill[len(t) :])] for t in trees]
        _fill(self.rows.parent_BM[:, :nodes], parents)

    def prime(self, form: Form) -> None:
        """Draft the first windows: the head reads what it has yet to read of every request."""
        if self.head is None:
            return
        assert self.step.drafter is not None
        rows = self.rows.part(0, len(self.held))
        starts, counts = [], []
        for b, request in enumerate(self.requests):
            start, hidden_MD = self.head.hand_over(request.number)
            read = len(hidden_MD)
            assert start + read == request.computed
            rows.hidden_BPD[b, :read] = hidden_MD
            rows.follows_BP[b, :read] = torch.tensor(request.tokens[start + 1 : start + 1 + read])
            starts.append(start)
            counts.append(read)
        device = rows.length_B.device
        start_B, count_B = (torch.tensor(x, device=device) for x in (starts, counts))
        self.step.drafter.draft(rows, form, start_B, count_B, self.extent.path)


def _fill(x_B: Tensor, values: Sequence[object]) -> None:
    """Set the first rows of a tensor, in one copy."""
    x_B[: len(values)].copy_(torch.tensor(values, dtype=x_B.dtype))
