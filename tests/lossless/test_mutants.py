"""Mutants of the loop that the text comparison must detect: one patch each, on the same requests."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.core.batch import ScheduledRequest
from specdec.errors import SpecdecError
from specdec.kernels.table import Kernels
from specdec.state_slots import backing as backings
from specdec.state_slots import window as windows
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.integrity import IntegrityError
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row
from specdec.verify import sampler as choosing
from specdec.verify.sampler import SamplingNode
from specdec.verify.walk import AcceptedPath, walk
from tests.lossless.cases import SHAPES, Case, differences, drafting_engine, generate
from tests.models.representatives import EVERY_CELL, REPRESENTATIVES, parts
from tests.selection import only

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]
Known = Callable[[str], tuple[Path, list[Case]]]


def keeps_the_texts(known: Known, family: str, backing: str = "record") -> bool:
    """Return whether trees of the oracle leave the texts unchanged; a crash counts as a change."""
    folder, cases = known(family)
    fields = {**SHAPES["tree"], "slots": backing, "chunk_tokens": 16}
    try:
        with drafting_engine(folder, "oracle", cases, rate=0.85, **fields) as (engine, seen):
            found = generate(engine, cases)
    except (SpecdecError, IntegrityError, AssertionError):
        return False
    assert seen.outcomes["part"] and seen.outcomes["all"] and seen.winding
    return not differences(cases, found, within=1e-6)


def noise_of_the_step(patch: Patch) -> None:
    """Make the noise depend on the number of calls."""
    inner, calls = choosing._add_noise, iter(range(1, 10**6))

    def wrong(scores_NV: Tensor, nodes: Sequence[SamplingNode], kernels: Kernels) -> None:
        step = next(calls)
        inner(scores_NV, [replace(node, position=node.position + step) for node in nodes], kernels)

    patch.setattr(choosing, "_add_noise", wrong)


def noise_of_the_row(patch: Patch) -> None:
    """Make the noise depend on a node's position in the batch."""
    inner = choosing._add_noise

    def wrong(scores_NV: Tensor, nodes: Sequence[SamplingNode], kernels: Kernels) -> None:
        moved = [replace(node, position=node.position + i) for i, node in enumerate(nodes)]
        inner(scores_NV, moved, kernels)

    patch.setattr(choosing, "_add_noise", wrong)


def noise_of_the_root(patch: Patch) -> None:
    """Give all nodes of a tree the position of its root."""
    inner = ScheduledRequest.node

    def wrong(row: ScheduledRequest, node: int) -> SamplingNode:
        right = inner(row, node)
        return replace(right, position=right.position - len(right.path))

    patch.setattr(ScheduledRequest, "node", wrong)


def penalties_of_the_root(patch: Patch) -> None:
    """Ignore a node's own path in its penalties."""
    inner = ScheduledRequest.node
    patch.setattr(ScheduledRequest, "node", lambda row, node: replace(inner(row, node), path=()))


def accepts_a_near_miss(patch: Patch) -> None:
    """Follow the first child if the chosen token was not drafted."""

    def wrong(chosen: Sequence[int], tree: TokenTree) -> AcceptedPath:
        path = walk(chosen, tree)
        children = [n for n in range(len(tree)) if tree.parents[n] == path.nodes[-1]]
        if not children:
            return path
        nodes = (*path.nodes, children[0])
        return AcceptedPath(nodes, (*path.emitted[:-1], tree.tokens[children[0]], chosen[children[0]]))

    patch.setattr("specdec.core.loop.walk", wrong)


def no_move(patch: Patch) -> None:
    """Leave the accepted path's KV at the tree's positions."""
    patch.setattr("specdec.models.network.Network.move", lambda *_: None)


def moves_one_short(patch: Patch) -> None:
    """Omit the last position of a path whose KV is moved."""
    from specdec.models.network import Network

    inner = Network.move
    patch.setattr(
        Network,
        "move",
        lambda self, memory, table, src, to: inner(self, memory, table, src[:, :-1], to[:, :-1]),
    )


def folds_twice(patch: Patch) -> None:
    """Release the records but still reference them: the next window folds them again."""
    inner = backings.release_path

    def wrong(arena: Any, owner: Any, before: CommittedState) -> CommittedState:
        inner(arena, owner, before)
        return before

    patch.setattr("specdec.core.loop.release_path", wrong)


def stale_record(patch: Patch) -> None:
    """Keep a rejected node's record in place of the last accepted one's."""
    inner = backings.RecordBacking.promote

    def wrong(self: Any, owner: Any, before: CommittedState, slots: Any, nodes: Any) -> CommittedState:
        rejected = [n for n in range(len(slots)) if n not in nodes]
        return inner(self, owner, before, slots, [*nodes[:-1], rejected[0]] if rejected else nodes)

    patch.setattr(backings.RecordBacking, "promote", wrong)


def short_path(patch: Patch) -> None:
    """Leave the last accepted record unfolded."""
    inner = ScheduledRequest.row

    def wrong(row: ScheduledRequest, backing: Any) -> Row:
        window = inner(row, backing)
        return replace(window, path=window.path[:-1])

    patch.setattr(ScheduledRequest, "row", wrong)


def freed_slot(patch: Patch) -> None:
    """Release an accepted record that its path still references: another row's draft overwrites it."""
    inner = backings.RecordBacking.promote

    def wrong(self: Any, owner: Any, before: CommittedState, slots: Any, nodes: Any) -> CommittedState:
        after = inner(self, owner, before, slots, nodes)
        self.arena.release_records(owner, after.path)
        return after

    patch.setattr(backings.RecordBacking, "promote", wrong)


def stale_state(patch: Patch) -> None:
    """Continue with the state before the tree."""
    inner = backings.SnapshotBacking.promote

    def wrong(self: Any, owner: Any, before: CommittedState, slots: Any, nodes: Any) -> CommittedState:
        return inner(self, owner, before, slots, [*nodes[:-1], 0])

    patch.setattr(backings.SnapshotBacking, "promote", wrong)


def blended_siblings(patch: Patch) -> None:
    """Make every second node attend to the node before it, ancestor or not."""
    inner = windows._ancestors

    def wrong(trees: list[TokenTree], device: torch.device) -> Tensor:
        ancestors_BMM = inner(trees, device)
        for node in range(2, ancestors_BMM.shape[1], 2):
            ancestors_BMM[:, node, node - 1] = True
        return ancestors_BMM

    patch.setattr(windows, "_ancestors", wrong)


STATEFUL = tuple(family for family in REPRESENTATIVES if (True, False) not in parts(family))
OF_EVERY_FAMILY = (
    *(noise_of_the_step, noise_of_the_row, noise_of_the_root, penalties_of_the_root, accepts_a_near_miss),
    *(no_move, moves_one_short, folds_twice, freed_slot),
)
"""Mutants that any mixer exposes; tested with two families."""
OF_A_MIXER: Sequence[tuple[Mutant, str, Sequence[str]]] = (
    (blended_siblings, "record", REPRESENTATIVES),
    (stale_record, "record", STATEFUL),
    (short_path, "record", STATEFUL),
    (stale_state, "snapshot", STATEFUL),
)
MUTANTS = [(mutant, "record", EVERY_CELL) for mutant in OF_EVERY_FAMILY] + [*OF_A_MIXER]


@pytest.mark.parametrize("backing", ["record", "snapshot"])
@pytest.mark.parametrize("family", only(EVERY_CELL, REPRESENTATIVES))
def test_the_unmutated_loop_keeps_the_texts(known: Known, family: str, backing: str) -> None:
    assert keeps_the_texts(known, family, backing)


@pytest.mark.parametrize(
    ("family", "mutant", "backing"),
    only(
        lambda cell: cell[0] in EVERY_CELL,
        [
            pytest.param(family, mutant, backing, id=f"{family}-{mutant.__name__}")
            for mutant, backing, families in MUTANTS
            for family in families
        ],
    ),
)
def test_a_mistake_changes_a_text(
    known: Known, family: str, mutant: Mutant, backing: str, monkeypatch: Patch
) -> None:
    known(family)
    with monkeypatch.context() as patch:
        mutant(patch)
        assert not keeps_the_texts(known, family, backing)
