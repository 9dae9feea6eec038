"""One request's part of a step: what the scheduler plans, the drafters widen and the window reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from specdec.core.outputs import DraftTree
from specdec.core.request import Request
from specdec.core.stats import Counts
from specdec.state_slots.backing import Backing, Committed, Draft
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row
from specdec.verify.choose import Choice, Node
from specdec.verify.walk import AcceptedPath


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What a request reads in a step: certain tokens, or the root of a tree and what was drafted below it."""

    request: Request
    tree: TokenTree
    is_decode: bool
    """It begins with the one token that was sampled last, drafted or not."""
    sample_at: Sequence[int] = ()
    """The nodes at which a token is sampled: all of a draft, or the last uncomputed token."""
    slots: Sequence[Any] | None = None
    """What the nodes of a draft write; None: nothing was drafted."""

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> Self:
        """Read the next tokens that the request has and the model has not computed."""
        start, is_last = request.num_computed_tokens, request.num_uncomputed_tokens == num_tokens
        tree = TokenTree.chain(request.tokens[start : start + num_tokens])
        return cls(request, tree, request.is_decoding, (num_tokens - 1,) if is_last else ())

    def with_draft(self, draft: Draft | None) -> Self:
        """Verify a draft as well, if there is one."""
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
        """Return the row of the window: what to read and where."""
        request, held = self.request, self.request.committed or Committed(0)
        row = Row(self.tree, request.num_computed_tokens, request.table_N, held.state, held.path)
        return row if self.slots is None else backing.dress(row, self.slots)

    def node(self, node: int) -> Node:
        """Return the rule, the position and the drafted tokens before it that sampling at a node needs."""
        path = () if self.slots is None else self.tree.path(node)[1:]
        request = self.request
        tokens = tuple([self.tree.tokens[n] for n in path])
        return Node(request.chooser, len(request.tokens) + len(path), tokens)

    def origins(self, path: AcceptedPath) -> list[int]:
        """Return the origin of each emitted token: the depth of its draft, or 0 for the target."""
        accepted = 0 if self.slots is None else len(path.nodes) - 1
        return [i + 1 if i < accepted else 0 for i in range(len(path.emitted))]

    def draft_tree(self, path: AcceptedPath, tokens: int) -> DraftTree:
        """Show the tree and what came of it to a request that took the first `tokens` of the path."""
        bonus = path.emitted[-1] if tokens == len(path.emitted) else None
        return DraftTree(self.tree.tokens, self.tree.parents, path.nodes[1:][:tokens], bonus)

    def count(self, counts: Counts, path: AcceptedPath, tokens: int, shared: Sequence[bool]) -> None:
        """Note what came of the draft, of whose path the request has taken `tokens`; which were `shared`."""
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


class Ahead(NamedTuple):
    """Steps of the device that are under way behind a result: they have folded each path into its state."""

    steps: int
    tokens: int
    """What each row will have read in them, as far as that is certain."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave its rows, whether the host decided it or the device."""

    rows: Sequence[ScheduledRequest]
    paths: Sequence[AcceptedPath]
    committed: Sequence[Committed | None]
    """Each row's state from now on."""
    seconds: Mapping[str, float]
    choices: Sequence[Mapping[int, Choice]] | None = None
    """What was sampled at each row's nodes; None: only the device knows."""
    ahead: Ahead | None = None
    """None: nothing is under way, and all that a head has yet to read waits on the host."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step came to, for observers; finished requests still have their memory."""

    result: StepResult
    taken: Sequence[int]
    """How many of each path's tokens its request took."""
    finished: Sequence[Request]
