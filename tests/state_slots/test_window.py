"""Rows of one width and kind are grouped, and each node finds its slot."""

import pytest
import torch

from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window

CPU = torch.device("cpu")
TREE = TokenTree((5, 6, 7), (-1, 0, 0))


def row(tree: TokenTree, state: int, **slots: object) -> Row:
    return Row(tree, 10, torch.tensor([state]), state, **slots)


def test_rows_are_grouped_by_width_and_draft_slots() -> None:
    chain = TokenTree.chain([1, 2, 3])
    rows = [
        row(TREE, 4, snapshots=[7, 8, 9]),
        row(chain, 3),
        row(TREE, 2, records=[(1, 0), (1, 1), (6, 2)], path=[(5, 5)]),
        row(TokenTree.chain([1]), 5),
        row(chain, 1, snapshots=[10, 11, 12]),
    ]
    window = build_window(rows, 4, CPU)
    single, certain, whole, recorded = window.groups
    assert [(g.width, g.rows, g.tentative) for g in window.groups] == [
        (1, 1, False),
        (3, 1, False),
        (3, 2, True),
        (3, 1, True),
    ]
    assert single.record is single.snapshot_BM is certain.record is certain.snapshot_BM is None
    assert whole.state_B.tolist() == [1, 4] and whole.record is whole.path is None
    assert whole.snapshot_BM is not None and whole.snapshot_BM.tolist() == [[10, 11, 12], [7, 8, 9]]
    assert recorded.snapshot_BM is None and recorded.record is not None and recorded.path is not None
    assert [x.tolist() for x in recorded.record] == [[[1, 1, 6]], [[0, 1, 2]]]
    for i, given in enumerate(rows):
        first = window.first_B[i]
        assert window.token_T[first : first + len(given.tree)].tolist() == list(given.tree.tokens)


@pytest.mark.parametrize("slots", [{"records": [(1, 0)]}, {"snapshots": [1, 2, 3, 4]}], ids=["few", "many"])
def test_every_node_has_one_slot(slots: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="every node needs a slot"):
        row(TREE, 1, **slots)
