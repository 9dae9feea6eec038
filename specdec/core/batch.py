"""One request's part of a step: planned by the scheduler, extended by drafts, turned into a window row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from specdec.core.outputs import DraftTree
from specdec.core.request import Request
from specdec.core.stats import SpeculationCounts
from specdec.state_slots.backing import Backing, CommittedState, DraftSlots
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row
from specdec.verify.sampler import SampledToken, SamplingNode
from specdec.verify.walk import AcceptedPath


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's tokens in a step: a chunk of known tokens, or a draft tree with its root."""

    request: Request
    tree: TokenTree
    is_decode: bool
    """Whether it starts with the last sampled token, drafted or not."""
    sample_at: Sequence[int] = ()
    """Nodes at which a token is sampled: all of a draft, or the last uncomputed token."""
    slots: Sequence[Any] | None = None
    """Slots that the draft's nodes write; None: no draft."""

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> Self:
        """Build a step over the next uncomputed tokens, without a draft."""
        start, is_last = request.num_computed_tokens, request.num_uncomputed_tokens == num_tokens
        tree = TokenTree.chain(request.tokens[start : start + num_tokens])
        return cls(request, tree, request.is_decoding, (num_tokens - 1,) if is_last else ())

    def with_draft(self, draft: DraftSlots | None) -> Self:
        """Return it with a draft to verify, if there is one."""
        if draft is None:
            return self
        tree = draft.tree
        return type(self)(self.request, tree, self.is_decode, range(len(tree)), draft.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.tree)

    @property
    def is_drafted(self) -> bool:
        return self.slots is not None

    def row(self, backing: Backing) -> Row:
        """Return the window row: tokens, position, block table, state and path."""
        request, held = self.request, self.request.committed or CommittedState(0)
        row = Row(self.tree, request.num_computed_tokens, request.table_N, held.state, held.path)
        return row if self.slots is None else backing.with_slots(row, self.slots)

    def node(self, node: int) -> SamplingNode:
        """Return the sampling context of a node: sampler, position, and the draft tokens before it."""
        path = () if self.slots is None else self.tree.path(node)[1:]
        request = self.request
        tokens = tuple([self.tree.tokens[n] for n in path])
        return SamplingNode(request.chooser, len(request.tokens) + len(path), tokens)

    def origins(self, path: AcceptedPath) -> list[int]:
        """Return the origin of each emitted token: the depth of its draft, or 0 for the target."""
        accepted = 0 if self.slots is None else len(path.nodes) - 1
        return [i + 1 if i < accepted else 0 for i in range(len(path.emitted))]

    def draft_tree(self, path: AcceptedPath, tokens: int) -> DraftTree:
        """Return the draft tree and its outcome, for a request that took the first `tokens` of the path."""
        bonus = path.emitted[-1] if tokens == len(path.emitted) else None
        return DraftTree(self.tree.tokens, self.tree.parents, path.nodes[1:][:tokens], bonus)

    def count(
        self, counts: SpeculationCounts, path: AcceptedPath, tokens: int, shared: Sequence[bool]
    ) -> None:
        """Record the outcome of the draft, for a request that took the first `tokens` of the path.

        `shared` marks emitted tokens that only finished requests' outputs had proposed.
        """
        accepted = len(path.nodes) - 1
        deeper = self.slots is not None and path.nodes[-1] in self.tree.parents
        counts.note(
            drafted=len(self.tree) - 1,
            depth=min(accepted + deeper, tokens),
            accepted=min(accepted, tokens),
            tokens=tokens,
            context=len(self.request.tokens) - tokens,
            from_outputs=sum(shared[: min(accepted, tokens)]),
        )


class InFlightSteps(NamedTuple):
    """Device steps in flight after a result; they have folded each path into its state."""

    steps: int
    tokens: int
    """Number of tokens per row that they certainly process."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, decided on the host or the device."""

    rows: Sequence[ScheduledRequest]
    paths: Sequence[AcceptedPath]
    committed: Sequence[CommittedState | None]
    """Each row's committed state after the step."""
    seconds: Mapping[str, float]
    choices: Sequence[Mapping[int, SampledToken]] | None = None
    """Samples at each row's nodes; None: only the device has them."""
    ahead: InFlightSteps | None = None
    """None: no step is in flight, and a head's pending hidden states are on the host."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a step, for observers; finished requests still own their memory."""

    result: StepResult
    taken: Sequence[int]
    """Number of tokens of each path that its request took."""
    finished: Sequence[Request]
