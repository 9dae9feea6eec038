"""What drafters are asked for a request, and what is made of their answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.core.request import Request
from specdec.draft.drafter import Drafter, Want
from specdec.draft.proposal import Proposal, Shape, merge

Answer = tuple[Drafter, Proposal]


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """What one row's drafters proposed, and what was made of it before it was cut."""

    shape: Shape | None
    """None: only look-ups were, which nothing was planned for."""
    parts: tuple[Answer, ...]
    merged: Proposal

    def shared(self, tokens: Sequence[int]) -> list[bool]:
        """Return for each token of a text, as far as proposed, whether only finished outputs had it."""
        told: list[bool] = []
        for _, proposal in self.parts:
            for depth, node in enumerate(proposal.tree.follow(tokens)[1:]):
                told += [True] * (depth == len(told))
                told[depth] &= bool(proposal.shared) and proposal.shared[node]
        return told


def want_of(request: Request, shape: Shape | None) -> Want:
    """Return what a drafter may know of a request: up to the token behind what the target has read."""
    tokens = (
        request.tokens
        if request.num_uncomputed_tokens == 1
        else request.tokens[: request.num_computed_tokens + 1]
    )
    return Want(
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
    """Make one proposal of all drafters' for a request."""
    return merge(request.tokens[-1], [proposal for _, proposal in answers], limit)


def widened(shape: Shape | None, found: Proposal) -> Shape | None:
    """Make room in a shape for what was found beside it, or for that alone."""
    if not found.num_drafted:
        return shape
    if shape is None:
        return Shape(max(found.tree.depths), 1, len(found.tree))
    return replace(shape, num_draft_tokens=max(shape.num_draft_tokens, len(found.tree)))
