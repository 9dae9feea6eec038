"""A node of a tree sees its own path, and rejected nodes leave no trace."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.state_slots import backing as backings
from specdec.state_slots import window as windows
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row
from tests.lossless.cases import EXACT, rounding
from tests.models.agreeing import VOCAB
from tests.models.drafted import Drafted, random_tree, reorder
from tests.models.representatives import REPRESENTATIVES
from tests.models.runner import Runner

BACKINGS = ("record", "snapshot")
PREFIX = [5, 17, 40, 3, 3, 28, 61, 9, 12]


@pytest.fixture(scope="module")
def runner(family_folder: Callable[..., Path]) -> Callable[[str], Runner]:
    made: dict[str, Runner] = {}

    def make(family: str) -> Runner:
        if family not in made:
            made[family] = Runner(family_folder(family), torch.float64, slabs=400)
        return made[family]

    return make


every_way = pytest.mark.parametrize(
    ("family", "backing"), [(family, backing) for family in REPRESENTATIVES for backing in BACKINGS]
)


def close(runner: Runner, found: Tensor, expected: Tensor, within: float = EXACT) -> bool:
    """Compare float64 values of one path in windows of two shapes."""
    within = rounding(runner.spec, within)
    return torch.allclose(found, expected, rtol=within, atol=within)


def drafted(runner: Runner, backing: str, seed: int) -> Drafted:
    """Start a sequence with a prefix and a committed tree path, so that records are pending."""
    rng, own = Random(seed), Drafted(runner, backing)
    own.read(PREFIX)
    own.verify(random_tree(rng, 7, VOCAB))
    own.promote(rng.randrange(7))
    return own


def committed_tokens(seed: int) -> list[int]:
    rng = Random(seed)
    tree = random_tree(rng, 7, VOCAB)
    return [*PREFIX, *(tree.tokens[n] for n in tree.path(rng.randrange(7)))]


def nodes_read_their_paths(runner: Runner, backing: str, seed: int, width: int) -> bool:
    """Compare each node's logits with those of its path as a chain after the committed tokens."""
    tree = random_tree(Random(seed + 100), width, VOCAB)
    found_NV = drafted(runner, backing, seed).verify(tree)
    known = committed_tokens(seed)
    for node in range(width):
        path = [tree.tokens[n] for n in tree.path(node)]
        if not close(runner, found_NV[node], runner.read([*known, *path], 64)[-1]):
            return False
    return True


def taking_back_equals_feeding(runner: Runner, backing: str, seed: int, width: int = 12) -> bool:
    """Commit every path and its prefixes; later logits must equal those after the same tokens as a chain."""
    tree = random_tree(Random(seed + 200), width, VOCAB)
    following = [11, 60, 2]
    for node in range(width):
        own = drafted(runner, backing, seed)
        own.verify(tree)
        known = [*committed_tokens(seed), *own.promote(node)]
        expected_TV = runner.read([*known, *following, 33], 64)[-4:]
        if not close(runner, own.verify(TokenTree.chain(following)), expected_TV[:3]):
            return False
        own.promote(2)
        own.materialize()
        if not close(runner, own.read([33]), expected_TV[3:]):
            return False
        runner.arena.release_owner(own.owner)
    return True


@every_way
@pytest.mark.parametrize(("width", "seed"), [(2, 0), (9, 1), (33, 2), (64, 3)])
def test_each_node_gives_the_logits_of_its_path(
    runner: Callable[[str], Runner], family: str, backing: str, width: int, seed: int
) -> None:
    assert nodes_read_their_paths(runner(family), backing, seed, width)


@every_way
def test_permuting_siblings_permutes_the_outputs(
    runner: Callable[[str], Runner], family: str, backing: str
) -> None:
    model, rng = runner(family), Random(4)
    tree = random_tree(rng, 24, VOCAB)
    found_NV = drafted(model, backing, 5).verify(tree)
    for _ in range(3):
        other, order = reorder(rng, tree)
        assert order != sorted(order)
        assert close(model, drafted(model, backing, 5).verify(other), found_NV[order])


@every_way
def test_a_rejected_branch_leaves_no_trace(
    runner: Callable[[str], Runner], family: str, backing: str
) -> None:
    """With other tokens in the rejected nodes, the next window's logits stay the same."""
    model = runner(family)
    for seed in range(4):
        rng = Random(seed)
        tree = random_tree(rng, 16, VOCAB)
        accepted = set(tree.path(rng.randrange(16)))
        tokens = tuple(t if n in accepted else (t + 31) % VOCAB for n, t in enumerate(tree.tokens))
        following = random_tree(rng, 9, VOCAB)
        found = []
        for own_tree in (tree, replace(tree, tokens=tokens)):
            own = drafted(model, backing, seed)
            own.verify(own_tree)
            own.promote(max(accepted))
            found.append(own.verify(following))
        assert close(model, found[0], found[1], within=1e-12)


@every_way
def test_taking_back_equals_feeding(runner: Callable[[str], Runner], family: str, backing: str) -> None:
    assert taking_back_equals_feeding(runner(family), backing, seed=6)


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_a_path_materializes_at_every_position(runner: Callable[[str], Runner], family: str) -> None:
    model, tree = runner(family), random_tree(Random(7), 20, VOCAB)
    deepest = max(range(20), key=lambda node: tree.depths[node])
    for length in range(tree.depths[deepest] + 2):
        own = drafted(model, "record", 8)
        own.verify(tree)
        said = own.promote(deepest)
        own.materialize(length)
        fed = Drafted(model, "record")
        fed.read([*committed_tokens(8), *said[:length]])
        assert all(close(model, a, b) for a, b in zip(own.states(), fed.states(), strict=True)), (
            f"after {length} of {len(said)} tokens"
        )
        # The mutant: an off-by-one position selects another state, if there is one.
        other = Drafted(model, "record")
        other.read([*committed_tokens(8), *said[:length], 1])
        pairs = list(zip(own.states(), other.states(), strict=True))
        assert not pairs or not all(close(model, a, b) for a, b in pairs)


# Mutants: mistakes that the checks above must detect.


@contextmanager
def wrong_mask(patch: pytest.MonkeyPatch, *, add: bool) -> Iterator[None]:
    """Make the last node attend to a neighbour that is no ancestor, or hide its parent from it."""
    inner = windows._ancestors

    def wrong(trees: list[TokenTree], device: torch.device) -> Tensor:
        ancestors_BMM = inner(trees, device)
        tree = trees[0]
        last = len(tree) - 1
        path = tree.path(last)
        others = [n for n in range(last) if n not in path]
        node = others[-1] if add and others else path[-2]
        ancestors_BMM[0, last, node] = add
        return ancestors_BMM

    with patch.context() as patched:
        patched.setattr(windows, "_ancestors", wrong)
        yield


@contextmanager
def swapped_parent(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the last node another parent when a window is built."""
    inner = windows.build_window

    def wrong(rows: list[Row], *rest: Any) -> windows.Window:
        trees = [row.tree for row in rows]
        swapped = [
            tree
            if tree.is_chain
            else replace(tree, parents=(*tree.parents[:-1], (tree.parents[-1] + 1) % (len(tree) - 1)))
            for tree in trees
        ]
        return inner([replace(row, tree=tree) for row, tree in zip(rows, swapped, strict=True)], *rest)

    with patch.context() as patched:
        patched.setattr("tests.models.drafted.build_window", wrong)
        yield


@contextmanager
def wrong_tap(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the convolution use the node before the last one instead of its parent."""
    inner = windows.taps

    def wrong(parents: Sequence[int], width: int) -> list[tuple[int, ...]]:
        taps, last = inner(parents, width), len(parents) - 1
        if width == 1:
            return taps
        before = width - 1 + (last - 1 if parents[last] != last - 1 else max(last - 2, 0))
        return [*taps[:-1], (*taps[-1][:-2], before, taps[-1][-1])]

    with patch.context() as patched:
        patched.setattr(windows, "taps", wrong)
        yield


@contextmanager
def stale_slot(patch: pytest.MonkeyPatch, kind: str) -> Iterator[None]:
    """Promote another node's slot: that of the first rejected one."""
    backing: Any = {"record": backings.RecordBacking, "snapshot": backings.SnapshotBacking}[kind]
    inner: Callable[..., CommittedState] = backing.promote

    def wrong(self: Any, owner: Any, before: CommittedState, slots: Any, nodes: Any) -> CommittedState:
        rejected = [n for n in range(len(slots)) if n not in nodes]
        if not slots or not rejected:
            return inner(self, owner, before, slots, nodes)
        return inner(self, owner, before, slots, [*nodes[:-1], rejected[0]])

    with patch.context() as patched:
        patched.setattr(backing, "promote", wrong)
        yield


@contextmanager
def no_move(patch: pytest.MonkeyPatch, runner: Runner) -> Iterator[None]:
    """Leave the accepted path's KV at the tree's positions."""
    with patch.context() as patched:
        patched.setattr(runner.network, "move", lambda *_: None)
        yield


@contextmanager
def no_fold(patch: pytest.MonkeyPatch, runner: Runner) -> Iterator[None]:
    """Skip folding records into the state."""
    with patch.context() as patched:
        patched.setattr(runner.network, "materialize", lambda *_: None)
        yield


@pytest.mark.parametrize("family", REPRESENTATIVES)
@pytest.mark.parametrize("mistake", ["sees a sibling", "misses its parent", "swapped parent", "wrong tap"])
def test_a_wrong_tree_is_noticed(
    runner: Callable[[str], Runner], family: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runner(family)
    mutants: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "sees a sibling": lambda: wrong_mask(monkeypatch, add=True),
        "misses its parent": lambda: wrong_mask(monkeypatch, add=False),
        "swapped parent": lambda: swapped_parent(monkeypatch),
        "wrong tap": lambda: wrong_tap(monkeypatch),
    }
    with mutants[mistake]():
        noticed = not nodes_read_their_paths(model, "record", seed=1, width=9)
    assert noticed != (mistake == "wrong tap" and not any(state.conv_inputs for state in model.layout.states))
    assert nodes_read_their_paths(model, "record", seed=1, width=9)


@every_way
@pytest.mark.parametrize("mistake", ["stale slot", "no move", "no fold"])
def test_a_wrong_commit_is_noticed(
    runner: Callable[[str], Runner],
    family: str,
    backing: str,
    mistake: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = runner(family)
    mutants: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "stale slot": lambda: stale_slot(monkeypatch, backing),
        "no move": lambda: no_move(monkeypatch, model),
        "no fold": lambda: no_fold(monkeypatch, model),
    }
    with mutants[mistake]():
        noticed = not taking_back_equals_feeding(model, backing, seed=6)
    has_states = bool(model.layout.states)
    harmless = {
        "stale slot": not has_states,
        "no move": not model.layout.kv,
        "no fold": not has_states or backing == "snapshot",
    }
    assert noticed != harmless[mistake]
