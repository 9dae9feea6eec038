"""The gated delta net: S ← a S + k uᵀ with u = β (v − a Sᵀ k), after a short convolution."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.group import RecordIds
from specdec.kernels.table import Kernels
from specdec.models.cut import Cut, columns, divided, rows
from specdec.models.linear import Linear
from specdec.models.mixers.base import ArenaViews, LoadedMixer, Mixer, MixerPlacement, Step, load_conv
from specdec.models.weights import Weights
from specdec.state_slots.layout import StateShape


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(Mixer):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    eps: float
    beta_scale: float = 1.0
    """Factor of the write strength."""
    apart: bool = False
    """Queries, keys and values have separate projections."""

    kind: ClassVar[str] = "gated delta net"

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_shape(self) -> StateShape:
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        sizes = (self.value_heads, self.key_dim, self.value_dim, self.conv - 1, self.channels)
        return StateShape(*sizes, runs=(keys, keys, values))

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        value = self.value_heads * self.value_dim
        return {
            "delta in": (self.channels + value + 2 * self.value_heads, hidden),
            "delta out": (hidden, value),
        }

    def token_flops(self) -> float:
        """Return the FLOPs of the convolution, and of the state's decay, correction, update and read."""
        return 2.0 * self.conv * self.channels + 7.0 * self.value_heads * self.key_dim * self.value_dim

    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Divide the key heads, and the value heads with them."""
        key, value = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        convolved, heads = rows(key, key, value), rows(self.value_heads)
        local = replace(
            self,
            key_heads=divided(self.key_heads, ranks, "key heads"),
            value_heads=divided(self.value_heads, ranks, "value heads"),
        )
        return local, {
            **{
                f"in_{name}.weight": rows(size)
                for name, size in zip("qkvz", (key, key, value, value), strict=True)
            },
            **dict.fromkeys(("in_b.weight", "in_a.weight", "A_log", "dt_bias"), heads),
            **dict.fromkeys(("in_qkv.weight", "conv.weight"), convolved),
            "out.weight": columns(value),
        }

    def build(self, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> "LoadedGatedDeltaNet":
        return LoadedGatedDeltaNet(self, weights, kernels, placement)


class LoadedGatedDeltaNet(LoadedMixer):
    def __init__(
        self, s: GatedDeltaNet, weights: Weights, kernels: Kernels, placement: MixerPlacement
    ) -> None:
        self.kernels, self.index = kernels, placement.state
        value = s.value_heads * s.value_dim
        key = s.key_heads * s.key_dim
        rows = {"in_q": key, "in_k": key, "in_v": value} if s.apart else {"in_qkv": s.channels}
        rows |= {"in_z": value, "in_b": s.value_heads, "in_a": s.value_heads}
        # The gates stay unquantised: they are multiplied into the state at every token.
        self.project = Linear.load(weights, kernels, rows, placement.reads, exact=("in_b", "in_a"))
        self.layer = DeltaLayer(
            *(s.key_heads, s.value_heads, s.key_dim, s.value_dim),
            conv_CK=load_conv(weights, s.channels, s.conv),
            A_log_H=weights.take("A_log", (s.value_heads,), torch.float32),
            dt_bias_H=weights.take("dt_bias", (s.value_heads,), torch.float32),
            norm_W=weights.take("norm.weight", (s.value_dim,)),
            eps=s.eps,
            beta_scale=s.beta_scale,
        )
        self.out = Linear.load(weights, kernels, {"out": placement.writes}, value)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        ops, memory = self.kernels, step.memory.recurrent(self.index)
        projected_TN = self.project(x_TD)
        o_TV = step.by_group(lambda group: ops.delta_net(group.take(projected_TN), self.layer, memory, group))
        return self.out(o_TV)

    def fold(self, memory: ArenaViews, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        views = memory.recurrent(self.index)
        k_path_BPGK = self.kernels.path_keys(self.layer, views, slot_B, path, length_B)
        self.kernels.fold(views, slot_B, path, length_B, k_path_BPGK)
