"""Drafter inputs per request, and the merging of their proposals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.core.request import Request
from specdec.draft.drafter import Drafter, DraftRequest
from specdec.draft.proposal import DraftShape, Proposal, merge

Answer = tuple[Drafter, Proposal]


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """One row's proposals, and their merged tree before it was cut."""

    shape: DraftShape | None
    """None: look-ups only, without a plan."""
    parts: tuple[Answer, ...]
    merged: Proposal

    def shared(self, tokens: Sequence[int]) -> list[bool]:
        """Return for each token, as far as proposed, whether only finished requests' outputs had it."""
        shared: list[bool] = []
        for _, proposal in self.parts:
            for depth, node in enumerate(proposal.tree.follow(tokens)[1:]):
                shared += [True] * (depth == len(shared))
                shared[depth] &= bool(proposal.shared) and proposal.shared[node]
        return shared


def want_of(request: Request, shape: DraftShape | None) -> DraftRequest:
    """Return a drafter's view of a request, up to the token after the last computed one."""
    tokens = (
        request.tokens
        if request.num_uncomputed_tokens == 1
        else request.tokens[: request.num_computed_tokens + 1]
    )
    return DraftRequest(
        request.number,
        request.prompt_length,
        tokens,
        request.table_N,
        shape,
        request.tenant,
        request.chooser,
        request,
    )


def merged(request: Request, answers: Sequence[Answer], limit: int | None = None) -> Proposal:
    """Merge all drafters' proposals for a request."""
    return merge(request.tokens[-1], [proposal for _, proposal in answers], limit)


def widened(shape: DraftShape | None, proposal: Proposal) -> DraftShape | None:
    """Widen a shape to hold a look-up result; without a shape, return that of the result."""
    if not proposal.num_drafted:
        return shape
    if shape is None:
        return DraftShape(max(proposal.tree.depths), 1, len(proposal.tree))
    return replace(shape, num_draft_tokens=max(shape.num_draft_tokens, len(proposal.tree)))
