"""What a network is made of, as plain data. A family file turns a Hugging Face config into a Network."""

from collections.abc import Iterator
from dataclasses import dataclass

from specdec.models.feed_forward import FeedForward
from specdec.models.mixers.base import Mixer
from specdec.models.norm import Norm


@dataclass(frozen=True, slots=True)
class Frame:
    """How half a layer stands in the residual stream: x ← keep x + post(Σ outputs · part(inputs · pre(x))).

    A half has one part, or several mixers side by side that read the same; each has its own two multipliers.
    With a side input x in pre(x) is x + side(x): the first mixer reads the stream and is no part.
    """

    pre: bool = True
    """What is read is normalised."""
    post: bool = False
    """What is added is normalised."""
    inputs: tuple[float, ...] = (1.0,)
    outputs: tuple[float, ...] = (1.0,)
    keep: float = 1.0
    keeps_normed: bool = False
    """The stream goes on from pre(x) in place of x."""
    side: bool = False


PRE_NORM = Frame()
POST_NORM = Frame(pre=False, post=True)
SANDWICH = Frame(post=True)


@dataclass(frozen=True, slots=True)
class Layer:
    """Mixers in a frame, then a feed-forward in another; either half may be absent."""

    mixers: tuple[Mixer, ...]
    ffn: FeedForward | None
    reads: int | None = None
    """Width of what its mixers read in place of the stream: a draft head makes that of its two inputs."""
    frame: Frame = PRE_NORM
    ffn_frame: Frame = PRE_NORM
    shares: int | None = None
    """The earlier layer whose first mixer lends its weights to the first of this one."""

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
    embed_scale: float = 1.0
    """What embeddings are multiplied by as they enter the stream."""
    logit_scale: float = 1.0
    wide_residual: bool = False
    """The stream is kept in float32 at least, and rounded where it is read."""

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
