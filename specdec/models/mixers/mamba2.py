"""Mamba-2: S ← a S + B (Δ x)ᵀ with one decay per head, after a short convolution."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from specdec.kernels.group import RecordIds
from specdec.kernels.mamba.layer import MambaLayer
from specdec.kernels.table import Kernels
from specdec.models.cut import ADDED_ONCE, Cut, columns, divided, rows
from specdec.models.linear import Linear
from specdec.models.mixers.base import ArenaViews, LoadedMixer, Mixer, MixerPlacement, Step, load_conv
from specdec.models.weights import Weights
from specdec.state_slots.layout import StateShape

Normed = Literal["of gated", "before gate", "none"]
"""Order of the output's norm and gate."""


@dataclass(frozen=True, slots=True)
class Mamba2(Mixer):
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
    out_bias: bool | None = None
    """Bias of the last projection; None: as for the first."""
    norm: Normed = "of gated"
    wide_norm: bool = False
    """Round the norm only once, after weight and gate."""
    scales: tuple[float, float, float, float, float] = (1.0,) * 5
    """Multipliers of the gate, x, B, C and dt from the first projection."""

    kind: ClassVar[str] = "Mamba-2"

    @property
    def inner(self) -> int:
        """Width of x and of the gate."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    def state_shape(self) -> StateShape:
        group = (self.groups, self.state_dim)
        sizes = (self.heads, self.state_dim, self.head_dim, self.conv - 1, self.channels)
        return StateShape(*sizes, runs=((self.heads, self.head_dim), group, group))

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {
            "mamba in": (self.inner + self.channels + self.heads, hidden),
            "mamba out": (hidden, self.inner),
        }

    def token_flops(self) -> float:
        """Return the FLOPs of the convolution, and of the state's decay, update and read."""
        return 2.0 * self.conv * self.channels + 5.0 * self.inner * self.state_dim

    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Divide the groups, and the heads with them; a norm is over a group."""
        shared = self.groups * self.state_dim
        local = replace(
            self,
            groups=divided(self.groups, ranks, "Mamba-2 groups"),
            heads=divided(self.heads, ranks, "Mamba-2 heads"),
        )
        first = rows(self.inner, self.inner, shared, shared, self.heads)
        return local, {
            **dict.fromkeys(("in.weight", "in.bias"), first),
            **dict.fromkeys(("conv.weight", "conv.bias"), rows(self.inner, shared, shared)),
            **dict.fromkeys(("A_log", "D", "dt_bias"), rows(self.heads)),
            "norm.weight": rows(self.inner),
            "out.weight": columns(self.inner),
            "out.bias": ADDED_ONCE,
        }

    def build(self, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> "LoadedMamba2":
        return LoadedMamba2(self, weights, kernels, placement)


class LoadedMamba2(LoadedMixer):
    def __init__(self, s: Mamba2, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> None:
        self.kernels, self.index = kernels, placement.state
        rows = {"in": s.inner + s.channels + s.heads}
        self.project = Linear.load(weights, kernels, rows, placement.reads, bias=s.bias)
        norm_dtype = torch.float32 if s.wide_norm else None
        self.layer = MambaLayer(
            *(s.groups, s.heads, s.state_dim, s.head_dim),
            conv_CK=load_conv(weights, s.channels, s.conv),
            conv_C=weights.take("conv.bias", (s.channels,)) if s.conv_bias else None,
            A_H=-torch.exp(weights.take("A_log", (s.heads,), torch.float32)),
            D_H=weights.take("D", (s.heads,), torch.float32),
            dt_bias_H=weights.take("dt_bias", (s.heads,), torch.float32),
            step_limit=s.step_limit,
            norm_N=None if s.norm == "none" else weights.take("norm.weight", (s.inner,), norm_dtype),
            eps=s.eps,
            gate_first=s.norm == "of gated",
        )
        self.scale_N = _spread(s, self.layer.D_H) if s.scales != (1.0,) * 5 else None
        out_bias = s.bias if s.out_bias is None else s.out_bias
        self.out = Linear.load(weights, kernels, {"out": placement.writes}, s.inner, bias=out_bias)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        ops, memory = self.kernels, step.memory.recurrent(self.index)
        projected_TN = self.project(x_TD)
        if self.scale_N is not None:
            projected_TN = projected_TN * self.scale_N.to(projected_TN.dtype)
        o_TN = step.by_group(lambda group: ops.mamba(group.take(projected_TN), self.layer, memory, group))
        return self.out(o_TN)

    def fold(self, memory: ArenaViews, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        views = memory.recurrent(self.index)
        k_path_BPGK = self.kernels.mamba_keys(self.layer, views, slot_B, path, length_B)
        self.kernels.fold(views, slot_B, path, length_B, k_path_BPGK)


def _spread(s: Mamba2, like: Tensor) -> Tensor:
    """Expand the multipliers to the projection's columns."""
    shared = s.groups * s.state_dim
    widths = (s.inner, s.inner, shared, shared, s.heads)
    return torch.cat([like.new_full((width,), by) for width, by in zip(widths, s.scales, strict=True)])
