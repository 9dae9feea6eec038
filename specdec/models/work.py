"""FLOPs of a prefill: the savings of a cached prefix."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

from specdec.models.spec import LayerSpec, NetworkSpec


@dataclass(frozen=True, slots=True)
class ReadingWork:
    """Returns the FLOPs of the matrices, attention and recurrences for a number of prompt tokens.

    Excludes logits, which a prompt needs only for its last token. Built once per network, since the prefix
    cache calls it often.
    """

    per_token: float
    per_pair: tuple[tuple[int | None, float], ...]
    """FLOPs per pair of a token and one it attends to, by attention window (None: unlimited)."""

    @classmethod
    def of(cls, network: NetworkSpec) -> Self:
        per_pair: dict[int | None, float] = defaultdict(float)
        for mixer in (mixer for layer in network.layers for mixer in layer.mixers):
            per_pair[mixer.reach()] += mixer.pair_flops()
        return cls(
            sum(_token_flops(layer, network.hidden) for layer in network.layers), tuple(per_pair.items())
        )

    def __call__(self, tokens: int) -> float:
        return self.per_token * tokens + sum(flops * _pairs(tokens, reach) for reach, flops in self.per_pair)


def _pairs(tokens: int, window: int | None) -> float:
    """Return a prompt's attention pairs: they grow by one per token up to the window."""
    ramp = tokens if window is None else min(tokens, window)
    return ramp * (ramp + 1) / 2 + (tokens - ramp) * ramp


def _token_flops(layer: LayerSpec, hidden: int) -> float:
    weights = sum(out * inner for part in layer.parts for out, inner in part.matrices(hidden).values())
    others = sum(mixer.token_flops() for mixer in layer.mixers)
    return 2.0 * weights + others + (layer.ffn.token_flops(hidden) if layer.ffn else 0.0)
