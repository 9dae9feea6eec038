"""What a network is made of, as plain data. A family file turns a Hugging Face config into a Network."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["swiglu", "relu2"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS normalisation that multiplies by `offset + weight`."""

    eps: float
    offset: float = 0.0
    wide: bool = True
    """The product with the weight is rounded once; otherwise x is, to the model's dtype, before it too."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate the first `dim` entries of a head."""

    dim: int
    theta: float


@dataclass(frozen=True, slots=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    qk_norm: Norm | None
    gated: bool
    """The query projection holds [query | gate] per head; the output is multiplied by sigmoid(gate)."""
    bias: bool = False
    out_bias: bool = True
    """Of one whose projections have biases: the last one too."""


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    eps: float


@dataclass(frozen=True, slots=True)
class Mamba2:
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv: int
    conv_bias: bool
    bias: bool
    eps: float
    step_limit: tuple[float, float]
    """Bounds on the discretisation step after softplus."""


@dataclass(frozen=True, slots=True)
class MLP:
    width: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoE:
    experts: int
    top_k: int
    width: int
    activation: Activation
    router: Literal["softmax", "sigmoid"]
    renormalise: bool
    shared_width: int
    """0: no shared expert."""
    shared_gate: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    latent: int | None = None
    """The experts work in this width, between two projections."""


Mixer = Attention | GatedDeltaNet | Mamba2
FeedForward = MLP | MoE


@dataclass(frozen=True, slots=True)
class Layer:
    """x + mixer(norm(x)), then x + ffn(norm(x)); either half may be absent."""

    mixer: Mixer | None
    ffn: FeedForward | None
    reads: int | None = None
    """Width of what its attention reads in place of norm(x): a draft head makes that of its two inputs."""


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


@dataclass(frozen=True, slots=True)
class Eagle:
    """A draft head with a folder of its own: one layer, which reads a hidden state and the token after it."""

    width: int
    vocab: int
    """Rows of its own embedding."""
    layer: Layer
    norm: Norm
    taps: tuple[int, ...]
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
