"""The decode loop: plan, draft, run the network over one window, choose, walk, commit, emit."""

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from specdec.core.batch import ScheduledRequest
from specdec.core.device.runner import Runner
from specdec.core.outputs import TokenLogprob
from specdec.core.prefix_keeper import Prefixes
from specdec.core.request import Request, Said
from specdec.core.scheduler import Scheduler
from specdec.core.speculator import Speculation
from specdec.core.stats import Clock, Counts
from specdec.draft.outlook import Outlook
from specdec.errors import EngineError, RequestError
from specdec.kernels.sampling.rules import NO_TOKEN
from specdec.models.network import LOGITS, Network
from specdec.models.replay import Replays
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import settle
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.tree import move_blocks
from specdec.state_slots.prefix.tuner import Tuner
from specdec.state_slots.slots import Owner
from specdec.state_slots.window import Window, build_window, record_ids
from specdec.verify.choose import Choice, Node, ask, choose, hear, logprob_of
from specdec.verify.synthetic import synthetic_walk
from specdec.verify.walk import AcceptedPath, walk

UNKNOWN = Choice(NO_TOKEN, None)
"""At a node where it is not known in time what may be chosen."""


class DecodeLoop:
    """Owns the network, the arena, the scheduler and the drafters; one thread steps it."""

    def __init__(
        self,
        network: Network,
        arena: Arena,
        scheduler: Scheduler,
        speculation: Speculation,
        device: torch.device,
    ) -> None:
        self.network, self.arena, self.scheduler, self.device = network, arena, scheduler, device
        self.speculation = speculation
        self.conv_width = max((s.conv_inputs + 1 for s in arena.layout.states), default=1)
        self.counts = Counts()
        self.runner: Runner | None = None
        """Takes over the steps that the device can decide, if any may."""
        scheduler.reclaim, scheduler.on_lose, scheduler.on_end = self.fold, speculation.lose, self._end
        scheduler.on_hit = speculation.resume
        self.prefixes: Prefixes | None = None
        self._shares = True
        arena.may_move, arena.on_move = self._may_move, self._move_blocks

    @property
    def outlook(self) -> Outlook | None:
        """Which drafts run now, and why; None where there are no drafters, or nothing was decided yet."""
        if not self.speculation.drafters:
            return None
        return (self.runner and self.runner.outlook) or self.speculation.policy.outlook

    @torch.inference_mode()
    def step(self) -> None:
        """Advance every request that takes part by one window."""
        if self.runner and self.runner.go_on():
            return
        clock, firsts = Clock(), Replays.firsts
        self._settle()
        plan = self.scheduler.schedule()
        if not plan.rows or (self.runner and self.runner.begin(plan.rows)):
            return
        clock.lap("rest")
        drafts = self.speculation.draft(plan.rows)
        rows = [row.with_draft(draft) for row, draft in zip(plan.rows, drafts, strict=True)]
        ask(row.node(node) for row in rows if row.request.chooser.limits for node in row.sample_at)
        clock.lap("draft")
        windows = [row.row(self.speculation.backing) for row in rows]
        window = build_window(windows, self.conv_width, self.device)
        head = self.speculation.head.head if self.speculation.head else None
        taps = head.taps if head else ()
        hidden_TD, tapped = self.network.forward_tapped(window, self.arena, taps)
        choices = self._choose(rows, window, hidden_TD)
        self._score_prompts(rows, window, hidden_TD)
        clock.lap("verify")
        paths = [self._walk(row, own) for row, own in zip(rows, choices, strict=True)]
        self.counts.sizes[sum(len(path.nodes) for path in paths)] += 1
        self._commit(rows, paths, window, head.condense(hidden_TD, tapped) if head else hidden_TD)
        if self.prefixes:
            self.prefixes.note(rows)
        clock.lap("commit")
        for row, path, own in zip(rows, paths, choices, strict=True):
            self._emit(row, path, own, clock.seconds)
        clock.lap("rest")
        if any(row.is_decode for row in rows):
            self.counts.spend(clock.seconds)
        if Replays.firsts == firsts:
            # Where nothing is chosen a GPU may not have been waited for.
            if self.prefixes and all(row.sample_at and not row.is_decode for row in rows):
                self.prefixes.observe(rows, sum(clock.seconds.values()))
            self.speculation.observe_step(rows)

    def _settle(self) -> None:
        """Hear what may follow outputs that have a form, and end those that have ended or cannot go on."""
        bound = [r for r in self.scheduler.running if r.chooser.limits]
        if not bound:
            return
        alone = len(bound) == len(self.scheduler.running) and not any(r.chooser.knows() for r in bound)
        hear([Node(r.chooser, len(r.tokens)) for r in bound], always=alone)
        for request in bound:
            if fault := request.chooser.fault:
                self._refuse(request, fault)
            elif request.settle():
                delta = request.take_delta()
                self.scheduler.release(request)
                request.send(delta)

    def _refuse(self, request: Request, fault: tuple[str, str]) -> None:
        """End a request that a limit does not let go on."""
        self.scheduler.release(request)
        request.fail(RequestError(": ".join(fault) + ".", field=fault[0]))

    def _choose(
        self, rows: Sequence[ScheduledRequest], window: Window, hidden_TD: Tensor
    ) -> list[dict[int, Choice]]:
        """Choose a token at every node that is asked, each by its own request's rule and path."""
        at = [(i, node) for i, row in enumerate(rows) for node in row.sample_at]
        choices: list[dict[int, Choice]] = [{} for _ in rows]
        if not at:
            return choices
        places = [window.first_B[i] + node for i, node in at]
        if places != list(range(len(hidden_TD))):
            hidden_TD = hidden_TD[torch.tensor(places, device=self.device)]
        nodes = [rows[i].node(node) for i, node in at]
        for start in range(0, len(at), LOGITS):
            some = slice(start, start + LOGITS)
            chosen = choose(self.network.logits(hidden_TD[some]), nodes[some], self.network.kernels)
            for (i, node), own, choice in zip(at[some], nodes[some], chosen, strict=True):
                choices[i][node] = choice if own.chooser.knows(own.path) else UNKNOWN
        return choices

    def _score_prompts(self, rows: Sequence[ScheduledRequest], window: Window, hidden_TD: Tensor) -> None:
        """Note how likely a prompt's tokens are where that is asked for, as far as they were read."""
        for row, first in zip(rows, window.first_B, strict=True):
            request, wanted = row.request, row.request.params.prompt_logprobs
            if wanted is None:
                continue
            start = first - request.computed
            begin = max(request.computed, len(request.prompt_logprobs))
            end = min(request.computed + len(row.tree), request.prompt_length - 1)
            for at in range(begin, end, LOGITS):
                upto = min(at + LOGITS, end)
                logits_NV = self.network.logits(hidden_TD[start + at : start + upto])
                for logits_V, token in zip(logits_NV, request.tokens[at + 1 : upto + 1], strict=True):
                    found = logprob_of(logits_V, token, wanted)
                    request.prompt_logprobs.append(TokenLogprob(token, found.chosen, found.top))

    def _walk(self, row: ScheduledRequest, choices: dict[int, Choice]) -> AcceptedPath:
        """Return the nodes that a request keeps and the tokens it gains. What was certain is kept whole."""
        if not row.is_drafted:
            return AcceptedPath(tuple(range(len(row.tree))), tuple(c.token for c in choices.values()))
        chosen = [choices[node].token for node in range(len(row.tree))]
        rates, request = self.speculation.synthetic, row.request
        if rates is None:
            path = walk(chosen, row.tree)
        else:
            seed, position = request.chooser.seed, len(request.tokens)
            path = synthetic_walk(chosen, row.tree, rates, seed=seed, position=position)
        if path.emitted[-1] != NO_TOKEN:
            return path
        # A masked product lets NaN through: it may be a rejected branch's. Or a limit told too late what may
        # follow. The token is tried again alone.
        self.speculation.distrust(request)
        return AcceptedPath(path.nodes[:-1], path.emitted[:-1])

    def _commit(
        self,
        rows: Sequence[ScheduledRequest],
        paths: Sequence[AcceptedPath],
        window: Window,
        hidden_TD: Tensor,
    ) -> None:
        """Promote each accepted path: its slots, its KV, and its hidden states for a head to read."""
        self._move(rows, paths)
        head = self.speculation.head
        for row, path, first in zip(rows, paths, window.first_B, strict=True):
            request, nodes = row.request, path.nodes
            if request.committed and row.slots is not None:
                promote = self.speculation.backing.promote
                request.committed = promote(request.number, request.committed, row.slots, nodes)
            elif request.committed:
                request.committed = settle(self.arena, request.number, request.committed)
            request.computed += len(nodes)
            if not head or not nodes:
                continue
            if len(nodes) == len(hidden_TD):
                head.read(request.number, hidden_TD, whole=True)
            else:
                straight = nodes[-1] == len(nodes) - 1
                kept = slice(first, first + len(nodes)) if straight else [first + node for node in nodes]
                head.read(request.number, hidden_TD[kept])

    def _move(self, rows: Sequence[ScheduledRequest], paths: Sequence[AcceptedPath]) -> None:
        """Bring the keys and values of a path that left the first branch to where the text goes on."""
        moves = [
            (row.request, path.nodes)
            for row, path in zip(rows, paths, strict=True)
            if path.nodes and path.nodes[-1] >= len(path.nodes)
        ]
        if not moves:
            return
        longest = max(len(nodes) for _, nodes in moves)
        tables = [request.table_N for request, _ in moves]
        table_BN = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        length_B1 = torch.tensor([[request.computed] for request, _ in moves])
        from_BP = length_B1 + torch.tensor([[*nodes, *range(len(nodes), longest)] for _, nodes in moves])
        to_BP = length_B1 + torch.arange(longest)
        self.network.move(self.arena, *(ids.to(self.device) for ids in (table_BN, from_BP, to_BP)))

    def emit_whole(self, row: ScheduledRequest, path: AcceptedPath, seconds: Mapping[str, float]) -> None:
        """Give a request the tokens of a step that the device ran from end to end."""
        self._emit(row, path, {}, seconds)

    def _emit(
        self,
        row: ScheduledRequest,
        path: AcceptedPath,
        choices: dict[int, Choice],
        seconds: Mapping[str, float],
    ) -> None:
        """Give a request its tokens and its caller what they make."""
        request = row.request
        if not path.emitted:
            return
        if NO_TOKEN in path.emitted:
            if self.prefixes:
                self.prefixes.cut(request)
            self.scheduler.release(request)
            request.fail(EngineError("The model's logits for this request are not numbers (NaN)."))
            return
        shared = self.speculation.learn(request, path.emitted)
        logprobs = [_logprob(choices.get(node)) for node in path.nodes[-len(path.emitted) :]]
        kept = request.accept(
            [Said(*each) for each in zip(path.emitted, row.origins(path), logprobs, strict=True)]
        )
        if fault := request.chooser.fault:
            self._refuse(request, fault)
            return
        if row.is_decode:
            row.count(request.counts, path, kept, shared)
            row.count(self.counts, path, kept, shared)
            request.counts.spend(seconds)
            if request.params.trees:
                request.show(row.told(path, kept))
        delta = request.take_delta()
        if request.finish_reason:
            # What has ended gives its memory back before anyone hears of it.
            self.scheduler.release(request)
        elif request.chooser.limits:
            ask([Node(request.chooser, len(request.tokens))])
        request.send(delta)

    def recover(self) -> None:
        """Put memory, drafters and the streak back to empty after a step that failed.

        Anything may be half done, so nothing is taken back piece by piece. Nobody runs by now; who waits has
        no memory, and goes on. Raise if the device cannot be used any more.
        """
        if self.runner:
            self.runner.abandon()
        self.speculation.forget_requests()
        self.arena.forget()
        if self.scheduler.cache:
            self.scheduler.cache.forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check_idle()

    def check_idle(self) -> None:
        """Prove, while no request runs, that memory is whole and holds only prefixes for later ones."""
        if self.scheduler.cache:
            self.scheduler.cache.check()
        else:
            self.arena.check_owners()

    def _end(self, request: Request) -> None:
        """Let what a request has read and said serve later ones, as far as that is wanted."""
        if self.prefixes:
            self.prefixes.end(request, self.runner.left_by(request) if self.runner else None)
        self.speculation.end(request, shared=self._shares)

    def keep_apart(self) -> None:
        """Let no request serve a later one: measurements must not look up what they wrote, nor skip it."""
        self.close()
        self._shares, self.prefixes, self.scheduler.cache = False, None, None

    def flush(self, caller: str | None = None) -> None:
        """Forget what ended requests, or one caller's, left: texts that drafters look up, and prefixes."""
        self.speculation.flush(caller)
        if self.scheduler.cache:
            self.scheduler.cache.flush(caller)

    def _may_move(self) -> bool:
        """Tell whether tables are the host's alone."""
        return not (self.runner and self.runner.streak.held)

    def _move_blocks(self, moved: Mapping[int, int], owners: Set[Owner]) -> None:
        """Put their owners' tables right after blocks have moved."""
        for request in self.scheduler.running:
            if request.number in owners:
                request.move_blocks(moved)
        move_blocks(moved, owners)

    def keep_prefixes(self, cache: PrefixCache, tuner: Tuner | None = None) -> None:
        """Let what a request has read serve later ones."""
        self.prefixes = Prefixes(cache, self.network, self.arena, self.speculation, self.device, tuner)
        self.scheduler.cache = cache
        if tuner:
            tuner.start()

    def close(self) -> None:
        """End what runs beside the loop."""
        if self.prefixes and self.prefixes.tuner:
            self.prefixes.tuner.close()

    def fold(self) -> bool:
        """Bring every running request's state up to date and give back what drafts held; tell if they did."""
        held = [r for r in self.scheduler.running if r.committed and r.committed.path]
        if held:
            committed = [r.committed for r in held if r.committed]
            path, length_B = record_ids([c.path for c in committed], self.device)
            state_B = torch.tensor([c.state for c in committed], device=self.device)
            self.network.materialize(self.arena, state_B, path, length_B)
            for request, before in zip(held, committed, strict=True):
                request.committed = settle(self.arena, request.number, before)
        trimmed = [self.scheduler.trim(request) for request in self.scheduler.running]
        return bool(held) or any(trimmed)


def _logprob(choice: Choice | None) -> TokenLogprob | None:
    if choice is None or choice.logprob is None:
        return None
    return TokenLogprob(choice.token, choice.logprob.chosen, choice.logprob.top)
