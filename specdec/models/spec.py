"""What a network is made of, as plain data. A family file turns a Hugging Face config into a Network."""

from collections.abc import Iterator
from dataclasses import dataclass

from specdec.models.feed_forward import FeedForward
from specdec.models.mixers.base import Mixer
from specdec.models.norm import Norm


@dataclass(frozen=True, slots=True)
class Layer:
    """x + mixer(norm(x)), then x + ffn(norm(x)); either half may be absent.

    Several mixers read the same norm(x), side by side, and their outputs are added.
    """

    mixers: tuple[Mixer, ...]
    ffn: FeedForward | None
    reads: int | None = None
    """Width of what its mixers read in place of norm(x): a draft head makes that of its two inputs."""

    @property
    def parts(self) -> tuple[Mixer | FeedForward, ...]:
        """List all that the layer is made of."""
        return (*self.mixers, *([self.ffn] if self.ffn else ()))


@dataclass(frozen=True, slots=True)
class Network:
    family: str
    vocab: int
    hidden: int
    layers: tuple[Layer, ...]
    norm: Norm
    tied: bool
    max_length: int
    eos: tuple[int, ...]
    mtp: tuple[Layer, ...] = ()
    """The layers of the multi-token head; empty: the checkpoint has none."""

    def mixers(self) -> Iterator[Mixer]:
        """List the mixers of all layers, the head's last."""
        return (mixer for layer in (*self.layers, *self.mtp) for mixer in layer.mixers)


@dataclass(frozen=True, slots=True)
class Eagle:
    """A draft head with a folder of its own: one layer, which reads a hidden state and the token after it."""

    width: int
    vocab: int
    """Rows of its own embedding."""
    layer: Layer
    norm: Norm
    aux_hidden_layers: tuple[int, ...]
    """The target's residual streams that it fuses, by the layer that they enter; one more than there are: the
    last layer's output. Empty: it reads what the target's final norm gives (EAGLE-1 and 2)."""
    target_width: int
    ranked: int
    """Tokens that it ranks."""
    fc_bias: bool
    own_embed: bool
    own_head: bool
    normed_residual: bool = False
    """The layer's residual stream starts from the normalised hidden state."""
