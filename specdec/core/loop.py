"""The decode loop: schedule, draft, run the network over one window, sample, walk, commit, emit."""

from collections.abc import Callable, Mapping, Sequence, Set

import torch

from specdec.core.batch import ScheduledRequest, StepReport, StepResult
from specdec.core.device.runner import Runner
from specdec.core.executor import Executor, Forward
from specdec.core.kv_connector import KVConnector
from specdec.core.outputs import TokenLogprob
from specdec.core.prefix_keeper import PrefixKeeper
from specdec.core.request import OutputToken, Request
from specdec.core.scheduler import Scheduler, SchedulerEvents
from specdec.core.speculation import Speculation
from specdec.core.stats import PhaseTimer, SpeculationCounts
from specdec.draft.decision import DraftDecision
from specdec.errors import EngineError, RequestError, SpecdecError
from specdec.kernels.sampling.rules import NO_TOKEN
from specdec.models.network import LOGITS
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import CommittedState, release_path
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.tree import move_blocks
from specdec.state_slots.prefix.tuner import Tuner
from specdec.state_slots.slots import Owner
from specdec.verify.sampler import SampledToken, SamplingNode, ask, choose, logprob_of, wait_for_masks
from specdec.verify.synthetic import accept_at_rates
from specdec.verify.walk import AcceptedPath, walk

UNKNOWN = SampledToken(NO_TOKEN, None)
"""Choice at a node whose grammar mask was not ready in time."""

Ended = tuple[Request, SpecdecError | None]
"""An ended request and its error, if any."""


class DecodeLoop:
    """Owns the arena, the scheduler and the drafters; one thread steps it."""

    def __init__(
        self, executor: Executor, arena: Arena, scheduler: Scheduler, speculation: Speculation
    ) -> None:
        self.executor, self.arena, self.scheduler = executor, arena, scheduler
        self.speculation, self.device = speculation, executor.device
        self.counts = SpeculationCounts()
        self.runner: Runner | None = None
        """Runs steps on the device where possible; None: all run on the host."""
        self.prefixes: PrefixKeeper | None = None
        self.observers: list[Callable[[StepReport], None]] = []
        """Called with each step's report, before finished requests release their memory."""
        self._shares = True
        arena.attach_tables(self)

    @property
    def outlook(self) -> DraftDecision | None:
        """Current drafting decision; None without drafters, or before the first decision."""
        if not self.speculation.drafters:
            return None
        return (self.runner and self.runner.outlook) or self.speculation.policy.outlook

    @torch.inference_mode()
    def step(self) -> None:
        """Advance every scheduled request by one window."""
        if self.runner and self.runner.go_on():
            return
        clock, first_passes, start_s = PhaseTimer(), self.arena.first_passes, self.speculation.clock()
        self._resolve_limits()
        if self.prefixes:
            # A cancelled request's tokens stay cached: the same conversation often continues.
            self.prefixes.keep_running([r for r in self.scheduler.running if r.cancelled])
        self.scheduler.connector.advance()
        plan = self.scheduler.schedule()
        self._follow(plan.events)
        if not plan.rows or (self.runner and not plan.has_more and self.runner.begin(plan.rows)):
            return
        clock.lap("rest")
        rows = self._draft(plan.rows)
        clock.lap("draft")
        windows = [row.row(self.speculation.backing) for row in rows]
        forward = self.executor.forward(windows, self.speculation.head_state.aux_layers)
        choices = self._choose(rows, forward)
        self._score_prompts(rows, forward)
        self._check_prefills(rows, forward)
        clock.lap("verify")
        paths = [self._walk(row, chosen) for row, chosen in zip(rows, choices, strict=True)]
        committed = self._promote(rows, paths)
        self.speculation.head_state.read(rows, paths, forward)
        clock.lap("commit")
        self.commit_and_emit(StepResult(rows, paths, committed, clock.seconds, choices))
        clock.lap("rest")
        # Without sampling, a GPU may not have been synchronised.
        if self.device.type == "cpu" or any(row.sample_at for row in rows):
            self.scheduler.work.observe(self.speculation.clock() - start_s)
        if any(row.is_decode for row in rows):
            self.counts.spend(clock.seconds)
        if self.arena.first_passes == first_passes:
            is_awaited = self.device.type == "cpu" or all(row.sample_at for row in rows)
            if self.prefixes and is_awaited and not any(row.is_decode for row in rows):
                self.prefixes.observe(rows, sum(clock.seconds.values()))
            widths = [row.num_tokens for row in rows if row.is_decode]
            self.speculation.observe_step(widths, sum(row.num_tokens for row in rows))

    def _resolve_limits(self) -> None:
        """Collect grammar masks, and finish requests whose output has ended or cannot continue."""
        bound = [r for r in self.scheduler.running if r.chooser.limits]
        if not bound:
            return
        alone = len(bound) == len(self.scheduler.running) and not any(r.chooser.knows() for r in bound)
        wait_for_masks([SamplingNode(r.chooser, len(r.tokens)) for r in bound], always=alone)
        ended: list[Ended] = []
        for request in bound:
            if fault := request.chooser.fault:
                ended.append((request, _refusal(fault)))
            elif request.check_finished():
                ended.append((request, None))
        self._finish(ended)

    def _follow(self, events: SchedulerEvents) -> None:
        """Apply scheduler events to drafters and the head."""
        for request in events.preempted:
            self.speculation.on_preempt(request)
        for request in events.dropped:
            self.speculation.end(request, shared=False)
        for request, hit in events.admitted:
            if hit:
                self.speculation.head_state.restore(request, hit)
        # The whole prompt may have been cached.
        self._finish([end for request, _ in events.admitted if (end := self._end_of_prefill(request))])

    def _draft(self, rows: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Attach drafts, and request grammar masks for their nodes."""
        drafts = self.speculation.draft(rows)
        drafted = [row.with_draft(draft) for row, draft in zip(rows, drafts, strict=True)]
        ask(row.node(node) for row in drafted if row.request.chooser.limits for node in row.sample_at)
        return drafted

    def _choose(self, rows: Sequence[ScheduledRequest], forward: Forward) -> list[dict[int, SampledToken]]:
        """Sample a token at every node in `sample_at`, by its request's rule and path."""
        at = [(i, node) for i, row in enumerate(rows) for node in row.sample_at]
        choices: list[dict[int, SampledToken]] = [{} for _ in rows]
        if not at:
            return choices
        hidden_TD = forward.hidden_TD
        indices = [forward.first_B[i] + node for i, node in at]
        if indices != list(range(len(hidden_TD))):
            hidden_TD = hidden_TD[torch.tensor(indices, device=self.device)]
        nodes = [rows[i].node(node) for i, node in at]
        for start in range(0, len(at), LOGITS):
            some = slice(start, start + LOGITS)
            chosen = choose(self.executor.logits(hidden_TD[some]), nodes[some], self.executor.kernels)
            for (i, node), sampling, choice in zip(at[some], nodes[some], chosen, strict=True):
                choices[i][node] = choice if sampling.chooser.knows(sampling.path) else UNKNOWN
        return choices

    def _score_prompts(self, rows: Sequence[ScheduledRequest], forward: Forward) -> None:
        """Append prompt log-probabilities of the tokens computed in this step, where requested."""
        for row, first in zip(rows, forward.first_B, strict=True):
            request, wanted = row.request, row.request.params.prompt_logprobs
            if wanted is None:
                continue
            start = first - request.num_computed_tokens
            begin = max(request.num_computed_tokens, len(request.prompt_logprobs))
            end = min(request.num_computed_tokens + row.num_tokens, request.prompt_length - 1)
            for at in range(begin, end, LOGITS):
                upto = min(at + LOGITS, end)
                logits_NV = self.executor.logits(forward.hidden_TD[start + at : start + upto])
                for logits_V, token in zip(logits_NV, request.tokens[at + 1 : upto + 1], strict=True):
                    logprob = logprob_of(logits_V, token, wanted)
                    request.prompt_logprobs.append(TokenLogprob(token, logprob.chosen, logprob.top))

    def _check_prefills(self, rows: Sequence[ScheduledRequest], forward: Forward) -> None:
        """Record whether the last hidden state of a prefill-only request is finite."""
        for row, first in zip(rows, forward.first_B, strict=True):
            if row.request.is_prefill_only and row.num_tokens == row.request.num_uncomputed_tokens - 1:
                last_D = forward.hidden_TD[first + row.num_tokens - 1]
                row.request.is_finite = bool(last_D.isfinite().all())

    def _walk(self, row: ScheduledRequest, choices: Mapping[int, SampledToken]) -> AcceptedPath:
        """Return the accepted path; a row without a draft accepts all its nodes."""
        if row.slots is None:
            return AcceptedPath(tuple(range(row.num_tokens)), tuple(c.token for c in choices.values()))
        chosen = [choices[node].token for node in range(row.num_tokens)]
        tree, request = row.tree, row.request
        if (rates := self.speculation.synthetic) is not None:
            seed, position = request.chooser.seed, len(request.tokens)
            chosen, tree = accept_at_rates(chosen, tree, rates, seed=seed, position=position)
        path = walk(chosen, tree)
        if path.emitted[-1] != NO_TOKEN:
            return path
        # NaN of a rejected branch can leak through a masked product, or a grammar mask came too late. The
        # token is sampled again without a draft.
        self.speculation.skip_draft_once(request)
        return AcceptedPath(path.nodes[:-1], path.emitted[:-1])

    def _promote(
        self, rows: Sequence[ScheduledRequest], paths: Sequence[AcceptedPath]
    ) -> list[CommittedState | None]:
        """Promote each accepted path: its KV entries and slots."""
        self._move(rows, paths)
        return [self._promoted(row, path) for row, path in zip(rows, paths, strict=True)]

    def _promoted(self, row: ScheduledRequest, path: AcceptedPath) -> CommittedState | None:
        number, before = row.request.number, row.request.committed
        if before is None:
            return None
        if row.slots is None:
            return release_path(self.arena, number, before)
        return self.speculation.backing.promote(number, before, row.slots, path.nodes)

    def _move(self, rows: Sequence[ScheduledRequest], paths: Sequence[AcceptedPath]) -> None:
        """Move the KV entries of paths that leave the first branch to consecutive positions."""
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
        length_B1 = torch.tensor([[request.num_computed_tokens] for request, _ in moves])
        from_BP = length_B1 + torch.tensor([[*nodes, *range(len(nodes), longest)] for _, nodes in moves])
        self.executor.move(table_BN, from_BP, length_B1 + torch.arange(longest))

    def commit_and_emit(self, result: StepResult) -> None:
        """Commit a host or device step to its requests and emit its tokens."""
        self.counts.sizes[sum(len(path.nodes) for path in result.paths)] += 1
        for row, path, committed in zip(result.rows, result.paths, result.committed, strict=True):
            row.request.num_computed_tokens += len(path.nodes)
            row.request.committed = committed
        self.scheduler.charge(row.request for row in result.rows)
        if self.prefixes:
            self.prefixes.note(result.rows)
            for row in result.rows:
                if row.request.is_prefill_only and not row.request.has_prefilled:
                    self.scheduler.connector.request_computed(row.request)
        lengths = [len(row.request.tokens) for row in result.rows] if self.observers else []
        ended = [item for i in range(len(result.rows)) if (item := self._emit(result, i))]
        if self.observers:
            finished = [request for request, _ in ended]
            num_accepted = [
                len(row.request.tokens) - before for row, before in zip(result.rows, lengths, strict=True)
            ]
            report = StepReport(result, num_accepted, finished)
            for observe in self.observers:
                observe(report)
        self._finish(ended, result)

    def _emit(self, result: StepResult, index: int) -> Ended | None:
        """Append a request's tokens and send a delta; return the request if it ended."""
        row, path = result.rows[index], result.paths[index]
        request = row.request
        if not path.emitted:
            return self._end_of_prefill(request)
        if NO_TOKEN in path.emitted:
            return self._end_with_nan(request)
        shared = self.speculation.acceptance.learn(request, path.emitted)
        choices = result.choices[index] if result.choices else {}
        logprobs = [_logprob(choices.get(node)) for node in path.nodes[-len(path.emitted) :]]
        kept = request.accept(
            [OutputToken(*each) for each in zip(path.emitted, row.origins(path), logprobs, strict=True)]
        )
        if fault := request.chooser.fault:
            return request, _refusal(fault)
        if row.is_decode:
            row.count(request.counts, path, kept, shared)
            row.count(self.counts, path, kept, shared)
            request.counts.spend(result.seconds)
            if request.params.trees:
                request.show(row.draft_tree(path, kept))
        if request.finish_reason:
            return request, None
        delta = request.take_delta()
        if request.chooser.limits:
            ask([SamplingNode(request.chooser, len(request.tokens))])
        request.send(delta)
        return None

    def _end_with_nan(self, request: Request) -> Ended:
        if self.prefixes:
            self.prefixes.cut(request)
        return request, EngineError("The model's logits for this request are not numbers (NaN).")

    def _end_of_prefill(self, request: Request) -> Ended | None:
        """Finish a prefill-only request whose prefill is complete."""
        if not request.has_prefilled:
            return None
        if not request.is_finite:
            return self._end_with_nan(request)
        request.end_prefill()
        return request, None

    def _finish(self, ended: Sequence[Ended], result: StepResult | None = None) -> None:
        """Cache ended requests' prefixes, release their memory, then send their last delta."""
        if not ended:
            return
        if self.prefixes:
            self.prefixes.keep([request for request, _ in ended], result.ahead if result else None)
        for request, error in ended:
            if request.has_prefilled and not error:
                self.scheduler.connector.request_finished(
                    request, self.speculation.head_state.last_hidden(request)
                )
            self.speculation.end(request, shared=self._shares)
            self.scheduler.release(request)
            if error:
                request.fail(error)
            else:
                request.send(request.take_delta())

    @torch.inference_mode()
    def rest(self) -> None:
        """Preempt running requests, move prefixes to the lower tier, and release the arena's memory.

        Nothing is admitted until `wake`; cancellations are still reported. All addresses in the arena,
        including those in tapes, stay valid.
        """
        if self.runner:
            self.runner.stop()
        if self.prefixes and self.prefixes.cache.lower:
            self.prefixes.keep_running(self.scheduler.running)
        self.scheduler.pause()
        self._follow(self.scheduler.schedule().events)
        self.scheduler.connector.withdraw_all()
        if self.scheduler.cache:
            self.scheduler.cache.move_down()
        self.check_idle()
        self.arena.give_back()

    def wake(self) -> None:
        """Use the arena again: waiting requests are admitted, preempted ones recomputed."""
        self.scheduler.resume()

    def recover(self) -> None:
        """Reset memory, drafters and the device batch after a failed step.

        Everything is dropped at once, since any part may be inconsistent. No request runs at this point;
        waiting requests have no memory and continue. Raise if the executor can run no further step.
        """
        if self.runner:
            self.runner.abandon()
        self.speculation.forget_requests()
        self.arena.forget(keeping=self.scheduler.connector.reset())
        if self.scheduler.cache:
            self.scheduler.cache.forget()
        self.executor.recover()
        self.check_idle()

    def check_idle(self) -> None:
        """Check, while no request runs, that the arena is intact and holds only prefixes and transfers."""
        if self.scheduler.cache:
            self.scheduler.cache.check(others=self.scheduler.connector.owners)
        else:
            self.arena.check_owners()

    def disable_sharing(self) -> None:
        """Disable sharing between requests, for benchmarks: no cached prefixes, no look-ups of outputs."""
        self.close()
        self.flush()
        self._shares, self.prefixes = False, None
        self.scheduler.connector = KVConnector()
        self.scheduler.keep_prefixes(None)

    def flush(self, caller: str | None = None) -> None:
        """Drop data cached from ended requests: look-up texts and prefixes, all or one caller's."""
        self.speculation.flush(caller)
        if self.scheduler.cache:
            self.scheduler.cache.flush(caller)

    def prepare(self) -> bool:
        """Record one step before its first use; return False if none is left or requests run."""
        if self.runner is None or self.scheduler.is_paused or self.scheduler.running:
            return False
        return self.runner.batch.steps.prepare()

    def may_move(self) -> bool:
        """Return whether the host alone holds block tables, so that blocks may move."""
        return not (self.runner and self.runner.batch.held)

    def move_blocks(self, moved: Mapping[int, int], owners: Set[Owner]) -> None:
        """Update the owners' block tables after blocks have moved."""
        for request in self.scheduler.running:
            if request.number in owners:
                request.move_blocks(moved)
        move_blocks(moved, owners)

    def reset_counts(self) -> None:
        """Reset the counts."""
        self.counts = SpeculationCounts()
        self.scheduler.limited_by.clear()
        if self.runner:
            self.runner.reset_counts()

    def run_on_device(self, runner: Runner) -> None:
        """Use this runner for steps from now on."""
        self.runner = runner

    def keep_prefixes(self, cache: PrefixCache, tuner: Tuner | None = None) -> None:
        """Enable the prefix cache."""
        self.prefixes = PrefixKeeper(cache, self.executor, self.arena, self.speculation.head_state, tuner)
        self.scheduler.keep_prefixes(cache)
        self.scheduler.park = self.prefixes.keep_running

    def close(self) -> None:
        """Stop background threads."""
        if self.prefixes and self.prefixes.tuner:
            self.prefixes.tuner.close()
        self.scheduler.connector.close()


def _refusal(fault: tuple[str, str]) -> RequestError:
    """Return the error for a request that a limit ended."""
    return RequestError(": ".join(fault) + ".", field=fault[0])


def _logprob(choice: SampledToken | None) -> TokenLogprob | None:
    if choice is None or choice.logprob is None:
        return None
    return TokenLogprob(choice.token, choice.logprob.chosen, choice.logprob.top)
