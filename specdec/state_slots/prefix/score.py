"""Whose prefix gives way first: the one that was used longest ago, or saves least for its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.state_slots.layout import Layout
from specdec.state_slots.prefix.tree import Node

Work = Callable[[int], float]
"""Says how much work it is to read so many tokens from the first on."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What a node is worth: the work that it saves over the next state above it, and the bytes it holds."""

    work: float
    bytes: int

    @property
    def per_byte(self) -> float:
        return self.work / self.bytes if self.bytes else 0.0


class Score:
    """Recency plus `alpha` times the work saved per byte, each as a part of the candidates' range."""

    def __init__(self, layout: Layout, work: Work, alpha: float = 0.0) -> None:
        self.layout, self.work, self.alpha = layout, work, alpha

    def gain(self, node: Node) -> Gain:
        held = len(node.blocks) * self.layout.block_bytes if not node.children else 0
        if node.state is None and self.layout.states:
            return Gain(0.0, held)
        above = node.parent
        while above and not above.is_root and above.state is None and self.layout.states:
            above = above.parent
        state = self.layout.slab_bytes if node.state is not None else 0
        return Gain(self.work(node.end) - self.work(above.end if above else 0), held + state)

    def order(self, nodes: Sequence[Node]) -> list[Node]:
        """Return them with the first to give way first."""
        if not self.alpha:
            return sorted(nodes, key=lambda node: node.used)
        used = _scaled([float(node.used) for node in nodes])
        gains = _scaled([self.gain(node).per_byte for node in nodes])
        scores = [r + self.alpha * g for r, g in zip(used, gains, strict=True)]
        return [nodes[i] for i in sorted(range(len(nodes)), key=lambda i: scores[i])]


def _scaled(values: Sequence[float]) -> list[float]:
    least = min(values, default=0.0)
    span = max(values, default=0.0) - least
    return [(value - least) / span if span else 0.0 for value in values]
