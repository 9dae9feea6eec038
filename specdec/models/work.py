"""How much arithmetic a network does while it reads a prompt: what a prefix that is kept saves."""

from dataclasses import dataclass
from typing import Self

from specdec.models.spec import MLP, Attention, FeedForward, GatedDeltaNet, Mamba2, Mixer, MoE, Network


@dataclass(frozen=True, slots=True)
class ReadingWork:
    """Count the multiplications and additions of the matrices, attention and recurrences over a prompt.

    Logits are not in it: a prompt needs those of its last token alone. Called with a number of tokens it
    counts their work; it is made once for a network, since whoever weighs prefixes asks it often.
    """

    per_token: float
    per_pair: float
    """Of a token and one that it looks at, itself included."""

    @classmethod
    def of(cls, network: Network) -> Self:
        per_token = per_pair = 0.0
        for layer in network.layers:
            weights = _mixer(layer.mixer, network.hidden) + _feed_forward(layer.ffn, network.hidden)
            per_token += 2.0 * weights + _state(layer.mixer)
            if isinstance(layer.mixer, Attention):
                per_pair += 4.0 * layer.mixer.heads * layer.mixer.head_dim
        return cls(per_token, per_pair)

    def __call__(self, tokens: int) -> float:
        return self.per_token * tokens + self.per_pair * (tokens * (tokens + 1) / 2)


def _mixer(mixer: Mixer | None, hidden: int) -> int:
    """Count the weights that each token is multiplied by."""
    match mixer:
        case Attention():
            wide = mixer.heads * mixer.head_dim
            return hidden * (wide * (2 + mixer.gated) + 2 * mixer.kv_heads * mixer.head_dim)
        case GatedDeltaNet():
            keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
            return hidden * (2 * keys + 3 * values + 2 * mixer.value_heads) + mixer.conv * (2 * keys + values)
        case Mamba2():
            inner, groups = mixer.heads * mixer.head_dim, 2 * mixer.groups * mixer.state_dim
            return hidden * (3 * inner + groups + mixer.heads) + mixer.conv * (inner + groups)
    return 0


def _state(mixer: Mixer | None) -> float:
    """Count what a recurrence does with its state for a token: decay, update (and correction), reading."""
    match mixer:
        case GatedDeltaNet():
            return 7.0 * mixer.value_heads * mixer.key_dim * mixer.value_dim
        case Mamba2():
            return 5.0 * mixer.heads * mixer.head_dim * mixer.state_dim
    return 0.0


def _feed_forward(ffn: FeedForward | None, hidden: int) -> int:
    match ffn:
        case MLP():
            return (3 if ffn.activation == "swiglu" else 2) * hidden * ffn.width
        case MoE():
            own = 3 if ffn.activation == "swiglu" else 2
            inner = ffn.latent or hidden
            latent = 2 * hidden * ffn.latent if ffn.latent else 0
            routed = own * inner * ffn.width * ffn.top_k
            return routed + own * hidden * ffn.shared_width + hidden * ffn.experts + latent
    return 0
