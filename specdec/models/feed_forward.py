"""Feed-forward layers: dense and mixture-of-experts."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from specdec.kernels.table import Kernels
from specdec.models.cut import ADDED_ONCE, Cut, columns, divided, rows
from specdec.models.linear import Linear, Projection
from specdec.models.weights import Weights

Activation = Literal["swiglu", "geglu", "relu2"]


class LoadedFeedForward(Protocol):
    """A feed-forward with its weights."""

    def __call__(self, x_TD: Tensor) -> Tensor: ...


class FeedForward(ABC):
    """One kind of feed-forward with its sizes: a frozen dataclass."""

    __slots__ = ()

    kind: ClassVar[str]
    """Human-readable name."""

    @abstractmethod
    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        """Return the matrices that every token is multiplied by, with their sizes [out, in]."""

    def token_flops(self, hidden: int) -> float:
        """Return a token's FLOPs besides these matrices."""
        return 0.0

    @abstractmethod
    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Return a rank's share, and the cut of each tensor that ranks divide, as `Mixer.cut` does."""

    @abstractmethod
    def build(self, hidden: int, weights: Weights, kernels: Kernels) -> LoadedFeedForward:
        """Load the weights, by names relative to the layer's."""


@dataclass(frozen=True, slots=True)
class MLP(FeedForward):
    width: int
    activation: Activation
    bias: bool = False
    gate_scale: float = 1.0
    """Multiplies the gate before its activation."""
    limit: float = math.inf
    """Upper bound of the activated gate, and bound of |up|."""

    kind: ClassVar[str] = "dense feed-forward"

    @property
    def up_rows(self) -> int:
        """Rows of the first product: gate and up, or only one of them."""
        return self.width * (1 if self.activation == "relu2" else 2)

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {"up": (self.up_rows, hidden), "down": (hidden, self.width)}

    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Divide the width."""
        own = rows(self.width)
        return replace(self, width=divided(self.width, ranks, "columns of a feed-forward")), {
            **{f"{name}.{leaf}": own for name in ("gate", "up") for leaf in ("weight", "bias")},
            "down.weight": columns(self.width),
            "down.bias": ADDED_ONCE,
        }

    def build(self, hidden: int, weights: Weights, kernels: Kernels) -> "LoadedMLP":
        return LoadedMLP(self, hidden, weights, kernels)


@dataclass(frozen=True, slots=True)
class MoE(FeedForward):
    experts: int
    top_k: int
    width: int
    activation: Literal["swiglu", "relu2"] = "swiglu"
    router: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    shared_width: int = 0
    """0: no shared expert."""
    shared_gate: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    narrow_router: bool = False
    """A sigmoid router computes in the model's dtype instead of float32."""
    corrected: bool = True
    """A sigmoid router has a bias that affects only the choice."""
    eps: float = 1e-20
    """Added to the sum that a sigmoid router renormalises by."""
    latent: int | None = None
    """Width of the experts' input and output, between two projections."""
    limit: float = math.inf
    """Upper bound of an expert's activated gate, and bound of |up|."""
    shared_limit: float = math.inf

    kind: ClassVar[str] = "mixture of experts"

    @property
    def shared(self) -> MLP | None:
        """The shared expert, or None."""
        return MLP(self.shared_width, self.activation, limit=self.shared_limit) if self.shared_width else None

    @property
    def up_rows(self) -> int:
        """Rows of an expert's first product."""
        return self.width * (2 if self.activation == "swiglu" else 1)

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        shapes = {"router": (self.experts, hidden)}
        if self.shared:
            shapes |= {f"shared {name}": size for name, size in self.shared.matrices(hidden).items()}
        if self.latent:
            shapes |= {"latent in": (self.latent, hidden), "latent out": (hidden, self.latent)}
        return shapes

    def token_flops(self, hidden: int) -> float:
        """Return the FLOPs of a token's chosen experts."""
        return 2.0 * self.top_k * (self.up_rows + self.width) * (self.latent or hidden)

    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Divide the width of every expert; the router and the latent projections are on every rank."""
        width = divided(self.width, ranks, "columns of an expert")
        up = (self.width,) * (self.up_rows // self.width)
        cuts = {"experts.up": Cut(1, up), "experts.down": Cut(2, (self.width,))}
        if self.shared is None:
            return replace(self, width=width), cuts
        shared, shared_cuts = self.shared.cut(ranks)
        cuts |= {f"shared.{name}": own for name, own in shared_cuts.items()}
        return replace(self, width=width, shared_width=shared.width), cuts

    def build(self, hidden: int, weights: Weights, kernels: Kernels) -> "LoadedMoE":
        return LoadedMoE(self, hidden, weights, kernels)


class LoadedMLP:
    def __init__(self, s: MLP, hidden: int, weights: Weights, kernels: Kernels) -> None:
        rows = dict.fromkeys(("up",) if s.activation == "relu2" else ("gate", "up"), s.width)
        self.width, self.gate_scale = s.width, s.gate_scale
        self.up: Projection = Linear.load(weights, kernels, rows, hidden, bias=s.bias)
        activation: Projection = getattr(kernels, s.activation)
        self.activate = activation if s.limit == math.inf else partial(kernels.swiglu, limit=s.limit)
        self.down = Linear.load(weights, kernels, {"down": hidden}, s.width, bias=s.bias)

    def with_up(self, up: Projection) -> "LoadedMLP":
        """Return a copy with another first product."""
        clone = copy(self)
        clone.up = up
        return clone

    def __call__(self, x_TD: Tensor) -> Tensor:
        up_TI = self.up(x_TD)
        if self.gate_scale != 1:
            up_TI[:, : self.width] *= self.gate_scale
        return self.down(self.activate(up_TI))


class LoadedMoE:
    def __init__(self, s: MoE, hidden: int, weights: Weights, kernels: Kernels) -> None:
        self.spec, self.kernels = s, kernels
        router_dtype = torch.float32 if s.router == "sigmoid" and not s.narrow_router else None
        router_ED = weights.take("router.weight", (s.experts, hidden), router_dtype)
        if s.shared_gate:
            # The shared expert's gate is one more row, so one product computes both.
            router_ED = torch.cat([router_ED, weights.take("shared_gate.weight", (1, hidden))])
        self.router, self.routed_in = Linear(kernels, router_ED), router_ED.dtype
        self.correction_E = self._correction(weights, router_ED) if s.router == "sigmoid" else None
        inner = s.latent or hidden
        self.up_EID = kernels.pack_experts(weights.matrix("experts.up", (s.experts, s.up_rows, inner)))
        self.down_EDI = kernels.pack_experts(weights.matrix("experts.down", (s.experts, inner, s.width)))
        if s.latent:
            self.latent_in = Linear.load(weights, kernels, {"latent_in": s.latent}, hidden)
            self.latent_out = Linear.load(weights, kernels, {"latent_out": hidden}, s.latent)
        self.shared = s.shared.build(hidden, weights.within("shared"), kernels) if s.shared else None

    def _correction(self, weights: Weights, router_ED: Tensor) -> Tensor:
        if self.spec.corrected:
            return weights.take("router.correction", (self.spec.experts,), torch.float32)
        return router_ED.new_zeros(self.spec.experts)

    def _route(self, score_TE: Tensor) -> tuple[Tensor, Tensor]:
        s, ops = self.spec, self.kernels
        if self.correction_E is None:
            return ops.route_softmax(score_TE, s.top_k, renormalise=s.renormalise)
        return ops.route_sigmoid(
            score_TE,
            self.correction_E,
            s.top_k,
            groups=s.groups,
            top_groups=s.top_groups,
            renormalise=s.renormalise,
            scale=s.scale,
            eps=s.eps,
        )

    def __call__(self, x_TD: Tensor) -> Tensor:
        s, ops = self.spec, self.kernels
        score_TE, gate_T1 = self.router(x_TD.to(self.routed_in)).tensor_split([s.experts], dim=1)
        index_TA, weight_TA = self._route(score_TE)
        inner_TD = self.latent_in(x_TD) if s.latent else x_TD
        gated = s.activation == "swiglu"
        y_TD = ops.experts(
            *(inner_TD, self.up_EID, self.down_EDI, index_TA, weight_TA), gated=gated, limit=s.limit
        )
        if s.latent:
            y_TD = self.latent_out(y_TD)
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD)
        return ops.add_gated(y_TD, shared_TD, gate_T1) if s.shared_gate else y_TD + shared_TD
