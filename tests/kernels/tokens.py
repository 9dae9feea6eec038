"""A recurrence's random inputs, and rows with pending records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecurrentMemory
from specdec.kernels.recurrence import reference
from tests.kernels.trees import Layer, build_group, make_memory, path_to, random_tree, scattered

SLOTS = {1: (4,), 3: (7, 2, 5)}
"""State slots of a group, by its number of rows."""


@dataclass(frozen=True)
class Tokens:
    """The inputs of a packed window [rows * width, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        beta = None if self.beta is None else change(self.beta)
        return Tokens(change(self.q), change(self.k), change(self.v), change(self.decay), beta)

    def pick(self, index: Sequence[int]) -> "Tokens":
        return self.map(lambda x: x[list(index)])


def draw_tokens(layer: Layer, count: int, seed: int = 1, *, delta: bool = True) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=layer.dtype)

    q, k = (torch.nn.functional.normalize(noise(layer.groups, layer.key), dim=-1) for _ in range(2))
    decay = -noise(*layer.decays).square()
    beta = torch.sigmoid(noise(layer.heads))
    return Tokens(q, k, noise(layer.heads, layer.value), decay, beta if delta else None)


def run(
    ops: ModuleType, tokens: Tokens, memory: RecurrentMemory, group: Group, k_path: Tensor | None = None
) -> Tensor:
    return ops.scan_window(tokens.q, tokens.k, tokens.v, tokens.decay, tokens.beta, memory, group, k_path)


def keys_of(tokens: Tokens, nodes: Sequence[Sequence[int]], width: int) -> Tensor:
    """Return the keys [B, P, G, K] of each row's accepted nodes, padded with NaN."""
    longest = max(map(len, nodes))
    k_path = tokens.k.new_full((len(nodes), longest, *tokens.k.shape[1:]), torch.nan)
    for b, path in enumerate(nodes):
        k_path[b, : len(path)] = tokens.k[[b * width + node for node in path]]
    return k_path


def with_pending(
    layer: Layer, rows: int, *, delta: bool = True
) -> tuple[RecurrentMemory, list[list[tuple[int, int]]], Tensor]:
    """Verify a window of 9 in every row and accept paths of different lengths, the first of three empty."""
    memory = make_memory(layer, SLOTS[rows])
    trees = [random_tree(9, seed) for seed in range(rows)]
    records = scattered(rows, 9, seed=5)
    group = build_group(trees, SLOTS[rows], records=records)
    tokens = draw_tokens(layer, rows * 9, seed=3, delta=delta)
    run(reference, tokens, memory, group)
    nodes = [path_to(tree, 8 - b) for b, tree in enumerate(trees)]
    if rows > 1:
        nodes[0] = []
    paths = [[records[b][i] for i in path] for b, path in enumerate(nodes)]
    return memory, paths, keys_of(tokens, nodes, 9)


def start(
    layer: Layer, rows: int, *, delta: bool, pending: bool
) -> tuple[RecurrentMemory, list[list[tuple[int, int]]] | None, Tensor | None]:
    if pending:
        return with_pending(layer, rows, delta=delta)
    return make_memory(layer, SLOTS[rows]), None, None
