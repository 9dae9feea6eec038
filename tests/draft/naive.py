"""Naive reference for the drafters: search everywhere, build every candidate, sort."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from specdec.draft.proposal import DraftShape, Proposal
from specdec.state_slots.tree import TokenTree

END = -1


@dataclass
class Candidate:
    """A node of the full tree of candidates."""

    path: tuple[int, ...]
    score: float


def tokens(vocabulary: int = 3, max_size: int = 60) -> st.SearchStrategy[list[int]]:
    """Draw texts over few tokens, so that contexts repeat."""
    return st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=max_size)


@st.composite
def shapes(draw: st.DrawFn) -> DraftShape:
    return DraftShape(draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 12)))


@st.composite
def proposals(draw: st.DrawFn, vocabulary: int = 4, max_size: int = 12) -> Proposal:
    """Draw trees whose scores often tie."""
    edges: dict[tuple[int, int], float] = {}
    for _ in range(draw(st.integers(0, max_size))):
        edge = (draw(st.integers(0, len(edges))), draw(st.integers(0, vocabulary - 1)))
        edges.setdefault(edge, draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])))
    scores = [1.0]
    for (parent, _), chance in edges.items():
        scores.append(chance * scores[parent])
    tree = TokenTree((0, *(token for _, token in edges)), (-1, *(parent for parent, _ in edges)))
    return Proposal(tree, tuple(scores))


def paths(proposal: Proposal) -> list[tuple[int, ...]]:
    """Return the tokens from the root's child to each node; empty for the root."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(proposal.tree.tokens, proposal.tree.parents, strict=True))[1:]:
        found.append((*found[parent], token))
    return found


def longest_match(
    texts: Sequence[Sequence[int]], context: Sequence[int], lengths: range
) -> tuple[int, list[tuple[int, int]]]:
    """Return the length of the longest suffix of `context` with a continuation, and each (text, position).

    Texts are in the order searched, positions latest first.
    """
    for length in reversed(lengths):
        if length <= len(context):
            wanted = list(context[len(context) - length :])
            places = [
                (i, place)
                for i, text in enumerate(texts)
                for place in range(len(text) - 1, length - 1, -1)
                if list(text[place - length : place]) == wanted and text[place] != END
            ]
            if places:
                return length, places
    return 0, []


def continuation(text: Sequence[int], place: int, limit: int, *, open_ended: bool) -> tuple[int, ...]:
    """Return the continuation at `place`, up to the end of the text or output; an open text repeats."""
    longer = list(text)
    for i in range(place, place + limit):
        if i == len(longer):
            if not open_ended:
                break
            longer.append(longer[place + (i - place) % (len(text) - place)])
    read = longer[place : place + limit]
    return tuple(read[: read.index(END)] if END in read else read)


def full_tree(
    continuations: Sequence[tuple[int, ...]],
    matched: int,
    topk: int,
    believe: Callable[[Sequence[int], int], list[float]],
) -> list[Candidate]:
    """Return every node that may be drafted, with its score."""
    candidates: list[Candidate] = []

    def visit(path: tuple[int, ...], score: float) -> None:
        depth = len(path)
        after = [c[depth] for c in continuations if len(c) > depth and c[:depth] == path]
        followers = list(dict.fromkeys(after))
        chances = believe([after.count(token) for token in followers], matched + depth) if followers else []
        ranked = sorted(zip(chances, followers, strict=True), key=lambda child: -child[0])[:topk]
        for chance, token in ranked:
            below = score * min(max(chance, 0.001), 0.999)
            candidates.append(Candidate((*path, token), below))
            visit((*path, token), below)

    visit((), 1.0)
    return candidates
