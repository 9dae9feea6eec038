"""A simulation with known step times and acceptance rates, for a policy to learn."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from specdec.draft.acceptance import TrackRecord
from specdec.draft.calibration import Calibrator
from specdec.draft.grow import Grower
from specdec.draft.policy import Policy, StepBatch
from specdec.draft.proposal import DraftShape, Proposal
from specdec.draft.widths import WIDTHS

OTHER = 999
"""A token that is never drafted."""
SECOND = 0.5
"""Probability of each further sibling, given that those before are wrong, relative to the first one's
rate."""
JITTER = 0.02
ROOM = 100
ROUNDS = 3
"""Warm-up measurements of each width and shape."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds per step, per token in it, per draft level, and per plan."""

    step: float
    token: float
    level: float
    plan: float = 0.0

    def verify(self, tokens: int) -> float:
        return self.step + self.token * tokens

    def draft(self, shape: DraftShape) -> float:
        return self.level * shape.num_steps


Rate = Callable[[int, int], float]
"""Probability that a draft's first choice is right, by row and step."""

Noise = Callable[[Random], float]
"""Factor by which some work is slowed down."""


def jitter(rng: Random) -> float:
    """Return the noise of an otherwise idle machine."""
    return 1 + JITTER * rng.uniform(-1, 1)


def neighbour(rng: Random) -> float:
    """Return the noise beside a busy neighbour: every third piece of work is interrupted, some for long."""
    return jitter(rng) * (1 + (rng.expovariate(0.5) if rng.random() < 0.35 else 0.0))


@dataclass(slots=True)
class Outcome:
    tokens: int = 0
    total_ms: float = 0.0
    wasted_ms: float = 0.0
    """Time beyond that of the same steps without drafts."""
    quiet_ms: float = 0.0
    """Time of those steps without drafts."""
    lost_ms: float = 0.0
    """Net time lost to plans, drafts and wider steps, without noise."""
    steps: int = 0
    asked: Counter[int] = field(default_factory=Counter)
    """Rows by requested draft depth; 0: no draft."""
    verified: Counter[int] = field(default_factory=Counter)
    """Verified draft tokens, by row."""

    @property
    def rate(self) -> float:
        return self.tokens / self.total_ms

    @property
    def waste(self) -> float:
        return self.wasted_ms / self.total_ms


class World:
    """Rows that decode endlessly under one policy."""

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        rate: Rate,
        rows: int = 1,
        *,
        seed: int = 0,
        found: Sequence[float] | None = None,
        grows: bool = True,
        noise: Noise = jitter,
    ) -> None:
        """`found`: scores of the chain that a look-up finds for every row whenever it is asked."""
        self.grows, self.noise = grows, noise
        self.policy, self.costs, self.rate = policy, costs, rate
        self.found = None if found is None else Proposal.chain(0, [0] * len(found), found)
        self.rng, self.calibrator = Random(seed), Calibrator()
        self.track = TrackRecord()
        self.tracks: list[TrackRecord] = []
        self.resize(rows)
        self.steps = 0
        widest = policy.bounds.num_draft_tokens
        for _ in range(ROUNDS):
            for width in (1, *(1 + nodes for nodes in WIDTHS if 1 + nodes < widest), widest):
                policy.steps.observe(1, width, self._jitter(costs.verify(width)))
            for shape in policy.shapes:
                policy.observe_draft(shape, 1, self._jitter(costs.draft(shape)))

    def resize(self, rows: int) -> None:
        """Add new requests, or end the last ones."""
        new = max(rows - len(self.tracks), 0)
        self.tracks = [*self.tracks[:rows], *(TrackRecord(self.track) for _ in range(new))]
        self.policy.on_new_rows(new / rows)

    def renew(self) -> None:
        """Replace all requests by new ones."""
        rows, self.tracks = len(self.tracks), []
        self.resize(rows)

    def run(self, steps: int) -> Outcome:
        outcome = Outcome()
        for _ in range(steps):
            self._step(outcome)
        return outcome

    def _step(self, outcome: Outcome) -> None:
        rows = len(self.tracks)
        batch = StepBatch(rows, rows)
        found: list[Proposal] = []

        def look_up() -> Sequence[Proposal]:
            found.extend([self.found or Proposal.bare(0)] * rows)
            return found

        looks = look_up if self.found else None
        shapes = self.policy.plan(batch, self.tracks, [ROOM] * rows, looks, grows=self.grows)
        plan_ms, draft_ms = self.costs.plan * (self.policy.current.batch is not None), 0.0
        if asked := [shape for shape in shapes if shape]:
            draft_ms = self._jitter(self.costs.draft(asked[0]))
            self.policy.observe_draft(asked[0], len(asked), draft_ms)
        looked_up = found[0] if found else Proposal.bare(0)
        proposals = [self._draft(shape) if shape else looked_up for shape in shapes]
        kept = self.policy.cut(batch, proposals)
        width = sum(len(own.tree) for own in kept)
        verify_ms = self._jitter(self.costs.verify(width))
        gained = 0
        for row, (shape, proposal, own) in enumerate(zip(shapes, proposals, kept, strict=True)):
            emitted = self._emit(proposal, own, self.rate(row, self.steps))
            outcome.tokens += len(emitted)
            gained += len(emitted) - 1
            outcome.asked[shape.num_steps if shape else 0] += 1
            outcome.verified[row] += own.num_drafted
            if shape:
                nodes = proposal.tree.follow(emitted)
                self.calibrator.observe(proposal.above(len(emitted)), nodes)
                depth = min(max(proposal.tree.depths), len(emitted))
                self.tracks[row].observe(shape, depth, len(nodes) - 1)
        self.policy.observe_step(rows, width, verify_ms, gained, plan_ms + draft_ms)
        outcome.total_ms += plan_ms + draft_ms + verify_ms
        wider_ms = self.costs.verify(width) - self.costs.verify(rows)
        outcome.wasted_ms += plan_ms + draft_ms + wider_ms
        plain_ms = self.costs.verify(rows)
        drafts_ms = self.costs.draft(asked[0]) if asked else 0.0
        outcome.quiet_ms += plain_ms
        outcome.lost_ms += plan_ms + drafts_ms + wider_ms - gained / rows * plain_ms
        outcome.steps += 1
        self.steps += 1

    def _draft(self, shape: DraftShape) -> Proposal:
        """Grow a draft with constant beliefs; the calibrator learns their actual value."""
        grower = Grower(0, shape, self.calibrator)
        beliefs = [0.5**rank for rank in range(1, shape.topk + 1)]
        while grower.frontier:
            for node in grower.frontier:
                grower.add(node, range(shape.topk), beliefs)
        return grower.finish()

    def _emit(self, proposal: Proposal, kept: Proposal, rate: float) -> Sequence[int]:
        """Return the target's tokens, as far as the verified nodes match."""
        text: list[int] = []
        while len(proposal.tree.follow(text)) > len(text):
            text.append(self._say(rate))
        return text[: len(kept.tree.follow(text))]

    def _say(self, rate: float) -> int:
        """Draw the target's token: 0 with probability `rate`, else each further one at a fraction of it."""
        for token in range(4):
            if self.rng.random() < (rate * SECOND if token else rate):
                return token
        return OTHER

    def _jitter(self, ms: float) -> float:
        return ms * self.noise(self.rng)
