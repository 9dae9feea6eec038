"""Run an artificial request through every width and shape before serving, to measure their costs."""

import itertools
import logging
import time
from collections.abc import Iterator, Sequence

from specdec.config.sampling import SamplingParams
from specdec.core.engine_core import EngineCore
from specdec.core.request import Request
from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import Drafter, DraftRequest, StatelessDrafter
from specdec.draft.policy import Policy
from specdec.draft.proposal import DraftShape, Proposal
from specdec.draft.widths import WIDTHS

logger = logging.getLogger(__name__)

ROUNDS = 16
"""Maximum rounds; the first times of a kind are not counted."""
EVERY = 5
"""All chains up to this depth are timed: the default depths."""
ENOUGH, LONGEST_S = 10, 0.2
"""Rounds that distinguish widths on a busy machine; fewer if steps take longer and vary less."""
PROMPT = 8
STRIDE = 7919
"""A prime, so that multiples repeat late in any vocabulary."""

Turn = tuple[list[Drafter], DraftShape | None]


class WarmupDrafter(StatelessDrafter):
    """Drafts chains of distinct tokens: equal ones would share their experts."""

    def __init__(self, vocab: int) -> None:
        self.vocab, self.calibrator = vocab, Calibrator()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Propose chains of widely spaced tokens."""
        return [self._chain(request) for request in requests]

    def _chain(self, request: DraftRequest) -> Proposal:
        count = request.shape.num_steps if request.shape else 0
        tokens = [(request.tokens[-1] + STRIDE * i) % self.vocab for i in range(1, count + 1)]
        return Proposal.chain(request.tokens[-1], tokens, [0.5] * count)


def warm_up(core: EngineCore) -> None:
    """Measure the costs of steps and drafts for the policy, without other lasting effects."""
    speculation, policy = core.loop.speculation, core.loop.speculation.policy
    drafters, widest = speculation.drafters, policy.bounds.num_draft_tokens
    planned: list[Drafter] = [speculation.planned] if speculation.planned else []
    widths = [1, *(1 + nodes for nodes in WIDTHS if 1 + nodes < widest), widest]
    # A plain step after a draft must fold it; those after another plain step show the plain cost.
    steps: list[Turn] = [([], None)] * 3
    steps += [([WarmupDrafter(core.vocab)], DraftShape(width - 1, 1, width)) for width in widths if width > 1]
    drafts: list[Turn] = [(planned, shape) for shape in _tried(policy) if planned]
    # Shapes longer than any sequence cannot be measured.
    steps, drafts = (
        [
            (turn_drafters, shape)
            for turn_drafters, shape in turns
            if PROMPT + 1 + _depth(shape) < core.max_length
        ]
        for turns in (steps, drafts)
    )
    logger.info("timing %d widths and %d drafts before the first request", len(steps), len(drafts))
    request = None
    for turn_drafters, shape in itertools.chain(_until_known(steps, policy), _until_known(drafts, policy)):
        # End it before its text does: an artificial text must not be cached.
        speculation.draft_by(turn_drafters, policy.of_shape(shape, drafts=turn_drafters is planned))
        if request and (request.finish_reason or request.num_remaining_tokens <= _depth(shape)):
            _end(core, request)
            request = None
        if request is None:
            request = _begin(core)
            while request.finish_reason is None and not request.is_decoding:
                core.step()
        if request.finish_reason is None:
            core.step()
    if request:
        _end(core, request)
    speculation.draft_by(drafters, policy)
    speculation.recall(None)
    core.loop.reset_counts()
    costs = {width: round(policy.steps.predict(1, width) * 1e3, 2) for width in widths}
    logger.info("a step of one row takes, in ms by width: %s", costs)


def _tried(policy: Policy) -> tuple[DraftShape, ...]:
    """Return the shapes whose drafting is timed: deep chains as sparsely as wide steps.

    Costs in between are interpolated, since each shape takes extra passes to time.
    """
    deepest = policy.bounds.num_steps
    depths = {*range(1, EVERY + 1), *WIDTHS, deepest}
    return tuple(shape for shape in policy.shapes if shape.topk > 1 or shape.num_steps in depths)


def _until_known(turns: Sequence[Turn], policy: Policy) -> Iterator[Turn]:
    """Yield turns round by round, so that a slow moment does not affect a single kind."""
    until_s = time.perf_counter() + LONGEST_S
    for count in range(1, ROUNDS + 1):
        yield from turns
        if all(_is_known(turn, policy) for turn in turns) and (
            count >= ENOUGH or time.perf_counter() > until_s
        ):
            return


def _depth(shape: DraftShape | None) -> int:
    return shape.num_steps if shape else 0


def _end(core: EngineCore, request: Request) -> None:
    """End a request; its drafter may not be active, so notify it directly."""
    core.abort(request)
    core.run_until_idle()
    if planned := core.loop.speculation.planned:
        planned.on_preempt(request.number)


def _is_known(turn: Turn, policy: Policy) -> bool:
    turn_drafters, shape = turn
    if shape and not isinstance(turn_drafters[0], WarmupDrafter):
        return policy.drafts[shape.topk].knows(1, shape.num_steps)
    return policy.steps.knows(1, shape.num_draft_tokens if shape else 1)


def _begin(core: EngineCore) -> Request:
    params = SamplingParams(max_tokens=core.max_length, temperature=0.0, ignore_eos=True)
    prompt = [token % core.vocab for token in range(min(PROMPT, core.max_length - 1))]
    return core.add_request(core.new_request(prompt, params, seed=0))
