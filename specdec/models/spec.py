"""A network as plain data. A family file converts a Hugging Face config to a Network."""

from collections.abc import Iterator
from dataclasses import dataclass

from specdec.models.feed_forward import FeedForward
from specdec.models.mixers.base import Mixer
from specdec.models.norm import Norm


@dataclass(frozen=True, slots=True)
class Frame:
    """Residual connection of half a layer: x ← keep x + post(Σ outputs · part(inputs · pre(x))).

    A half has one part, or several parallel mixers with the same input; each has its own two multipliers.
    With a side input x in pre(x) is x + side(x): the first mixer computes side and is not a part.
    """

    pre: bool = True
    """Normalise the input."""
    post: bool = False
    """Normalise the output."""
    inputs: tuple[float, ...] = (1.0,)
    outputs: tuple[float, ...] = (1.0,)
    keep: float = 1.0
    keeps_normed: bool = False
    """The stream continues from pre(x) instead of x."""
    side: bool = False


PRE_NORM = Frame()
POST_NORM = Frame(pre=False, post=True)
SANDWICH = Frame(post=True)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Mixers in a frame, then a feed-forward in another; either half may be absent."""

    mixers: tuple[Mixer, ...]
    ffn: FeedForward | None
    reads: int | None = None
    """Input width of its mixers if it is not the stream: a draft head concatenates two inputs."""
    frame: Frame = PRE_NORM
    ffn_frame: Frame = PRE_NORM
    shares: int | None = None
    """The earlier layer whose first mixer lends its weights to this layer's first."""

    @property
    def parts(self) -> tuple[Mixer | FeedForward, ...]:
        """Return the layer's mixers and feed-forward."""
        return (*self.mixers, *([self.ffn] if self.ffn else ()))


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    family: str
    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: Norm
    tied: bool
    max_length: int
    eos: tuple[int, ...]
    mtp: tuple[LayerSpec, ...] = ()
    """The layers of the multi-token head; empty without one."""
    embed_scale: float = 1.0
    """Multiplier of the embeddings."""
    logit_scale: float = 1.0
    wide_residual: bool = False
    """Keep the stream at least in float32, rounding it for its readers."""

    def mixers(self) -> Iterator[Mixer]:
        """Return the mixers of all layers, the head's last."""
        return (mixer for layer in (*self.layers, *self.mtp) for mixer in layer.mixers)


@dataclass(frozen=True, slots=True)
class Head:
    """A draft head with its own folder."""

    width: int
    vocab: int
    """Rows of its own embedding."""
    layers: tuple[LayerSpec, ...]
    norm: Norm
    aux_hidden_layers: tuple[int, ...]
    """The target's residual streams that it fuses, by the layer that they enter; the number of layers means
    the last layer's output. Empty: it reads the output of the target's final norm (EAGLE-1 and 2)."""
    target_width: int
    ranked: int
    """Number of tokens that it ranks."""
    own_embed: bool
    own_head: bool


@dataclass(frozen=True, slots=True)
class Eagle(Head):
    """A head whose first layer reads a hidden state and the next token."""

    fc_bias: bool
    normed_residual: bool = False
    """The first layer's residual stream starts from the normalised hidden state."""
    norms_each: bool = False
    """Each of the target's streams is normalised before `fc` (EAGLE-3.1)."""
    norms_joined: bool = False
    """The concatenated streams are normalised before `fc`."""
    returns_normed: bool = False
    """The output after `norm` is the next input (EAGLE-3.1)."""


@dataclass(frozen=True, slots=True)
class Block(Head):
    """A head that drafts a whole block in one pass (DFlash): its attention reads the target's streams."""

    block: int
    """Tokens of a pass: the last accepted token, then masks."""
    mask: int
    """The token at positions to draft."""
    causal: tuple[bool, ...]
    """By layer: whether a token sees only earlier ones of its block."""
    first: int
    """The position of the block whose output is the first draft token."""
    transitions: int = 0
    """Rank of the bias that a token gets from the one before (DSpark); 0: none."""

    @property
    def deepest(self) -> int:
        """Return the number of tokens that a pass drafts."""
        return self.block - self.first
