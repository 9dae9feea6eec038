"""How much arithmetic a network does while it reads a prompt: what a cached prefix saves."""

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
    per_pair: float
    """Of a token and one that it attends to, itself included."""

    @classmethod
    def of(cls, network: Network) -> Self:
        return cls(
            sum(_token_flops(layer, network.hidden) for layer in network.layers),
            sum(mixer.pair_flops() for layer in network.layers for mixer in layer.mixers),
        )

    def __call__(self, tokens: int) -> float:
        return self.per_token * tokens + self.per_pair * (tokens * (tokens + 1) / 2)


def _token_flops(layer: Layer, hidden: int) -> float:
    weights = sum(out * inner for part in layer.parts for out, inner in part.matrices(hidden).values())
    others = sum(mixer.token_flops() for mixer in layer.mixers)
    return 2.0 * weights + others + (layer.ffn.token_flops(hidden) if layer.ffn else 0.0)
