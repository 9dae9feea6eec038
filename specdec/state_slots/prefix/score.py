"""Eviction order of prefixes: least recently used first, or least work saved per byte."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.state_slots.layout import Layout
from specdec.state_slots.prefix.tree import PrefixNode

Work = Callable[[int], float]
"""Returns the FLOPs of prefilling a number of tokens from the first on."""


@dataclass(frozen=True, slots=True)
class NodeGain:
    """A node's value: the work it saves relative to the next state above it, and its bytes."""

    work: float
    bytes: int

    @property
    def per_byte(self) -> float:
        return self.work / self.bytes if self.bytes else 0.0


class Score:
    """Recency plus `alpha` times the work saved per byte, each scaled to the candidates' range.

    Any thread may set `alpha` at any time: each order is made with one value of it.
    """

    def __init__(self, layout: Layout, work: Work, alpha: float = 0.0) -> None:
        self.layout, self.work, self.alpha = layout, work, alpha

    def held(self, node: PrefixNode) -> int:
        """Return a node's bytes."""
        state = self.layout.slab_bytes if node.state is not None else 0
        return len(node.blocks) * self.layout.block_bytes + state

    def gain(self, node: PrefixNode) -> NodeGain:
        freed_bytes = len(node.blocks) * self.layout.block_bytes if not node.children else 0
        if node.state is None and self.layout.states:
            return NodeGain(0.0, freed_bytes)
        above = node.parent
        while above and not above.is_root and above.state is None and self.layout.states:
            above = above.parent
        state = self.layout.slab_bytes if node.state is not None else 0
        return NodeGain(self.work(node.end) - self.work(above.end if above else 0), freed_bytes + state)

    def of_largest(self, nodes: list[PrefixNode], excluded: Iterable[PrefixNode]) -> list[PrefixNode]:
        """Return the nodes of the caller with the most cached bytes, so that no other loses its fair share.

        Ties go to the caller of the least recently used node.
        """
        oldest = dict[str, int]()
        for node in nodes:
            oldest[node.tenant.caller] = min(node.used, oldest.get(node.tenant.caller, node.used))
        if len(oldest) < 2:
            return nodes
        tenant_bytes = dict.fromkeys(oldest, 0)
        for node in excluded:
            if node.tenant.caller in tenant_bytes:
                tenant_bytes[node.tenant.caller] += self.held(node)
        largest = max(tenant_bytes, key=lambda caller: (tenant_bytes[caller], -oldest[caller]))
        return [node for node in nodes if node.tenant.caller == largest]

    def order(self, nodes: Sequence[PrefixNode]) -> list[PrefixNode]:
        """Return the nodes in the order of eviction."""
        alpha = self.alpha
        if not alpha:
            return sorted(nodes, key=lambda node: node.used)
        used_N = _scaled([float(node.used) for node in nodes])
        gain_N = _scaled([self.gain(node).per_byte for node in nodes])
        return [nodes[i] for i in np.argsort(used_N + alpha * gain_N, kind="stable")]


def _scaled(values: Sequence[float]) -> NDArray[np.float64]:
    value_N = np.asarray(values, np.float64)
    if not len(value_N):
        return value_N
    low, high = float(value_N.min()), float(value_N.max())
    return (value_N - low) / ((high - low) or 1.0)
