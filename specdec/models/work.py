"""The arithmetic of a prefill: what a cached prefix saves."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

from specdec.models.spec import Layer, Network


@dataclass(frozen=True, slots=True)
class ReadingWork:
    """Count the multiplications and additions of the matrices, attention and recurrences over a prompt.

    Logits are not in it: a prompt needs those of its last token alone. Called with a number of tokens it
    counts their work; it is made once for a network, since the prefix cache asks it often.
    """

    per_token: float
    per_pair: tuple[tuple[int | None, float], ...]
    """Of a token and one that it attends to, itself included, by the number of those at most (None: all)."""

    @classmethod
    def of(cls, network: Network) -> Self:
        per_pair: dict[int | None, float] = defaultdict(float)
        for mixer in (mixer for layer in network.layers for mixer in layer.mixers):
            per_pair[mixer.reach()] += mixer.pair_flops()
        return cls(
            sum(_token_flops(layer, network.hidden) for layer in network.layers), tuple(per_pair.items())
        )

    def __call__(self, tokens: int) -> float:
        return self.per_token * tokens + sum(own * _pairs(tokens, reach) for reach, own in self.per_pair)


def _pairs(tokens: int, reach: int | None) -> float:
    """Count the pairs of a prompt: each token sees one more than that before it, and then as many."""
    growing = tokens if reach is None else min(tokens, reach)
    return growing * (growing + 1) / 2 + (tokens - growing) * growing


def _token_flops(layer: Layer, hidden: int) -> float:
    weights = sum(out * inner for part in layer.parts for out, inner in part.matrices(hidden).values())
    others = sum(mixer.token_flops() for mixer in layer.mixers)
    return 2.0 * weights + others + (layer.ffn.token_flops(hidden) if layer.ffn else 0.0)
