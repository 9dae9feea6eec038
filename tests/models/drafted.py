"""One sequence of a network that verifies trees and commits paths like the step loop, without a loop."""

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.group import RecurrentMemory
from specdec.state_slots.backing import BACKINGS, CommittedState, release_path
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window, record_ids
from tests.models.runner import CPU, Runner

BRANCHES = 5
"""Maximum distance between a random node and its parent."""


class Drafted:
    """Owner of one sequence's blocks and slots in a runner's arena; `verify` and `promote` alternate."""

    def __init__(self, runner: Runner, backing: str) -> None:
        self.runner, self.own = runner, runner.sequence()
        self.owner = runner._owners
        self.backing = BACKINGS[backing](runner.arena)
        self.committed = CommittedState(self.own.state)
        self.tree = TokenTree.chain([0])
        self.slots: Sequence[Any] = ()

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Run committed tokens; return the logits of each."""
        logits_TV = self._run(self._row(TokenTree.chain(tokens)))
        self.committed = release_path(self.runner.arena, self.owner, self.committed)
        self.own.length += len(tokens)
        return logits_TV

    @torch.inference_mode()
    def verify(self, tree: TokenTree) -> Tensor:
        """Verify a tree without committing it; return the logits of each node."""
        slots = self.backing.begin(self.owner, len(tree))
        assert slots is not None
        self.tree, self.slots = tree, slots
        return self._run(self.backing.with_slots(self._row(tree), slots))

    @torch.inference_mode()
    def promote(self, node: int) -> tuple[int, ...]:
        """Commit the path to a node of the tree; return its tokens."""
        nodes, own = self.tree.path(node), self.own
        source = own.length + torch.tensor([nodes])
        target = own.length + torch.arange(len(nodes))[None]
        self.runner.network.move(self.runner.arena, own.table_N[None], source, target)
        self.committed = self.backing.promote(self.owner, self.committed, self.slots, nodes)
        own.length += len(nodes)
        return tuple(self.tree.tokens[n] for n in nodes)

    @torch.inference_mode()
    def materialize(self, length: int | None = None) -> None:
        """Fold the committed path, or its first `length` tokens, into the state."""
        committed = self.committed
        if committed.path:
            path, length_B = record_ids([committed.path], CPU)
            length_B = length_B if length is None else torch.tensor([length])
            state_B = torch.tensor([committed.state])
            self.runner.network.materialize(self.runner.arena, state_B, path, length_B)
            self.committed = release_path(self.runner.arena, self.owner, committed)

    def states(self) -> list[Tensor]:
        """Return every layer's state and window, flattened."""
        found = []
        for layer in range(len(self.runner.layout.states)):
            memory: RecurrentMemory = self.runner.arena.recurrent(layer)
            slot = self.committed.state
            found += [memory.state_SHKW[slot].flatten(), memory.window_SIC[slot].flatten()]
        return found

    def _row(self, tree: TokenTree) -> Row:
        own = self.own
        return Row(tree, own.length, own.table_N, self.committed.state, self.committed.path)

    def _run(self, row: Row) -> Tensor:
        window = build_window([row], self.runner.conv_width, CPU)
        return self.runner.network.logits(self.runner.network.forward(window, self.runner.arena))


def random_tree(rng: Random, width: int, vocab: int) -> TokenTree:
    """Draw a tree in which siblings differ."""
    parents = [-1, *(rng.randrange(max(0, i - BRANCHES), i) for i in range(1, width))]
    tokens, taken = [rng.randrange(vocab)], set[tuple[int, int]]()
    for parent in parents[1:]:
        free = [token for token in range(vocab) if (parent, token) not in taken]
        tokens.append(rng.choice(free))
        taken.add((parent, tokens[-1]))
    return TokenTree(tuple(tokens), tuple(parents))


def reorder(rng: Random, tree: TokenTree) -> tuple[TokenTree, list[int]]:
    """Put a tree's nodes in another topological order; return the old index of each new node."""
    order, open_nodes = [0], [n for n in range(1, len(tree)) if tree.parents[n] == 0]
    while open_nodes:
        node = open_nodes.pop(rng.randrange(len(open_nodes)))
        order.append(node)
        open_nodes += [n for n in range(len(tree)) if tree.parents[n] == node]
    place = {node: i for i, node in enumerate(order)}
    parents = tuple(place[tree.parents[node]] if node else -1 for node in order)
    return TokenTree(tuple(tree.tokens[node] for node in order), parents), order
