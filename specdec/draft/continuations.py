"""Build a draft tree from earlier continuations of a context."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from specdec.draft.calibration import Calibrator
from specdec.draft.proposal import DraftShape, Proposal
from specdec.state_slots.tree import TokenTree

Believe = Callable[[Sequence[int], int], list[float]]
"""Maps the count of each following token, latest first, and the match length to a probability per token."""


def grow_tree(
    root: int,
    continuations: Sequence[Sequence[int]],
    *,
    matched: int,
    shape: DraftShape,
    believe: Believe,
    calibrator: Calibrator,
    shared: int = 0,
) -> Proposal:
    """Build the best draft tree from the trie of the continuations, which are given latest first.

    The trie is never built: a node is the list of continuations that pass through it, and only selected nodes
    get children. No child scores above its parent, so these are the best nodes of the whole trie. Its depth
    is the length of the longest continuation. The last `shared` continuations are other requests' outputs; a
    node that only these pass through is marked.
    """
    num_own = len(continuations) - shared
    tokens, parents, scores, beliefs, from_others, depths = [root], [-1], [1.0], [1.0], [False], [0]
    # Ties are broken by the unique serial number: the node pushed first wins, and later fields are never
    # compared.
    heap: list[tuple[float, int, int, int, float, Sequence[int]]] = []
    serial = 0

    def open_node(node: int, score: float, depth: int, passing: Sequence[int]) -> None:
        nonlocal serial
        followers: dict[int, list[int]] = {}
        for number in passing:
            continuation = continuations[number]
            if depth < len(continuation):
                followers.setdefault(continuation[depth], []).append(number)
        if not followers:
            return
        chances = believe([len(group) for group in followers.values()], matched + depth)
        ranked = sorted(zip(chances, followers, strict=True), key=lambda child: -child[0])[: shape.topk]
        calibrated = calibrator.siblings([belief for belief, _ in ranked], depth + 1)
        for (belief, token), probability in zip(ranked, calibrated, strict=True):
            heappush(heap, (-score * probability, serial, node, token, belief, followers[token]))
            serial += 1

    open_node(0, 1.0, 0, range(len(continuations)))
    while heap and len(tokens) < shape.num_draft_tokens:
        negative, _, parent, token, belief, passing = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        scores.append(-negative)
        beliefs.append(belief)
        from_others.append(passing[0] >= num_own)
        depths.append(depths[parent] + 1)
        open_node(len(tokens) - 1, -negative, depths[-1], passing)
    tree, marked = TokenTree(tuple(tokens), tuple(parents)), tuple(from_others) if shared else ()
    return Proposal(tree, tuple(scores), tuple(beliefs), marked)
