"""How much arithmetic a network does while it reads a prompt: what a prefix that is kept saves."""

from specdec.models.spec import MLP, Attention, FeedForward, GatedDeltaNet, Mamba2, Mixer, MoE, Network


def read_flops(network: Network, tokens: int) -> float:
    """Count the multiplications and additions of the matrices, attention and recurrences over so many tokens.

    Logits are not in it: a prompt needs those of its last token alone.
    """
    hidden = network.hidden
    total = 0.0
    for layer in network.layers:
        weights = _mixer(layer.mixer, hidden) + _feed_forward(layer.ffn, hidden)
        total += 2.0 * weights * tokens + _state(layer.mixer) * tokens
        if isinstance(layer.mixer, Attention):
            pairs = tokens * (tokens + 1) / 2
            total += 4.0 * layer.mixer.heads * layer.mixer.head_dim * pairs
    return total


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
