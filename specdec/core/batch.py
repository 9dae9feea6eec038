"""One request's part of a step, between the plan and the window."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.core.outputs import DraftTree
from specdec.core.request import Request
from specdec.core.scheduler import Share
from specdec.core.stats import Counts
from specdec.state_slots.backing import Backing, Committed, Draft
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row
from specdec.verify.choose import Node
from specdec.verify.walk import AcceptedPath


@dataclass(frozen=True, slots=True)
class Part:
    """What a request reads in a step: certain tokens, or the root of a tree and what was drafted below it."""

    request: Request
    tree: TokenTree
    draft: Draft | None
    decodes: bool
    """It began with the one token that was chosen last, drafted or not."""
    asked: Sequence[int]
    """The nodes at which a token is chosen: all of a draft, or the last that the request owed."""

    def row(self, backing: Backing) -> Row:
        """Tell the window what to read and where."""
        request, held = self.request, self.request.committed or Committed(0)
        row = Row(self.tree, request.computed, request.table_N, held.state, held.path)
        return backing.dress(row, self.draft.slots) if self.draft else row

    def node(self, node: int) -> Node:
        """Say for whom, where in the text and after which drafted tokens a token is chosen at a node."""
        path = self.tree.path(node)[1:] if self.draft else ()
        request = self.request
        return Node(
            request.chooser, len(request.tokens) + len(path), tuple(self.tree.tokens[n] for n in path)
        )

    def origins(self, path: AcceptedPath) -> list[int]:
        """Say where each token that the path emits came from: the depth of its draft, or 0, the target."""
        accepted = len(path.nodes) - 1 if self.draft else 0
        return [i + 1 if i < accepted else 0 for i in range(len(path.emitted))]

    def told(self, path: AcceptedPath, tokens: int) -> DraftTree:
        """Show the tree and what came of it to a request that took so many of the path's tokens."""
        bonus = path.emitted[-1] if tokens == len(path.emitted) else None
        return DraftTree(self.tree.tokens, self.tree.parents, path.nodes[1:][:tokens], bonus)

    def count(self, counts: Counts, path: AcceptedPath, tokens: int, shared: Sequence[bool]) -> None:
        """Note what came of the draft, of whose tokens the request took so many; which were `shared`."""
        accepted = len(path.nodes) - 1
        deeper = bool(self.draft) and path.nodes[-1] in self.tree.parents
        counts.note(
            drafted=len(self.tree) - 1,
            depth=min(accepted + deeper, tokens),
            accepted=min(accepted, tokens),
            tokens=tokens,
            from_outputs=sum(shared[: min(accepted, tokens)]),
        )


def build_parts(shares: Sequence[Share], drafts: Sequence[Draft | None]) -> list[Part]:
    """Make each share's part: the draft's tree, or a chain of the next tokens that are owed."""
    parts = []
    for share, draft in zip(shares, drafts, strict=True):
        request, count = share.request, share.count
        tree = (
            draft.tree
            if draft
            else TokenTree.chain(request.tokens[request.computed : request.computed + count])
        )
        last = [count - 1] if request.owed == count else []
        asked = range(len(tree)) if draft else last
        parts.append(Part(request, tree, draft, request.decodes, asked))
    return parts
