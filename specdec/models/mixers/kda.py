"""Kimi delta attention: the gated delta rule with a decay per key, S ← diag(a) S + k uᵀ."""

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
class KimiDeltaAttention(Mixer):
    heads: int
    head_dim: int
    conv: int
    eps: float
    gate_rank: int | None
    """Rank of the two-matrix projections of decays and of the gate; None: single full-rank matrices."""
    bound: float | None = None
    """Lower bound of log-decays."""

    kind: ClassVar[str] = "Kimi delta attention"

    @property
    def width(self) -> int:
        """Columns each of queries, keys, values, decays and the output gate."""
        return self.heads * self.head_dim

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows of the first projection: convolved inputs, then gates, write strengths and decays."""
        gate = {"in_z": self.width} if self.gate_rank is None else {"in_z_a": self.gate_rank}
        decay = {"in_a": self.width} if self.gate_rank is None else {"in_a_a": self.gate_rank}
        convolved = dict.fromkeys(("in_q", "in_k", "in_v"), self.width)
        return {**convolved, **gate, "in_b": self.heads, **decay}

    def state_shape(self) -> StateShape:
        sizes = (self.heads, self.head_dim, self.head_dim, self.conv - 1, 3 * self.width)
        return StateShape(*sizes, decay_dim=self.head_dim, runs=((self.heads, self.head_dim),) * 3)

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        gates = {}
        if self.gate_rank is not None:
            gates = {f"delta {name}": (self.width, self.gate_rank) for name in ("gate", "decay")}
        return {"delta in": (sum(self.rows.values()), hidden), **gates, "delta out": (hidden, self.width)}

    def token_flops(self) -> float:
        """Return the FLOPs of the convolution, and of the state's decay, correction, update and read."""
        return 2.0 * self.conv * 3 * self.width + 7.0 * self.width * self.head_dim

    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Divide the heads; the first of two low-rank matrices is on every rank."""
        wide, heads = rows(self.width), rows(self.heads)
        local = replace(self, heads=divided(self.heads, ranks, "heads of Kimi delta attention"))
        return local, {
            **{f"in_{name}.weight": wide for name in ("q", "k", "v", "z", "z_b", "a", "a_b")},
            **dict.fromkeys(("in_b.weight", "A_log", "dt_bias"), heads),
            "conv.weight": rows(*(self.width,) * 3),
            "out.weight": columns(self.width),
        }

    def build(
        self, weights: Weights, kernels: Kernels, placement: MixerPlacement
    ) -> "LoadedKimiDeltaAttention":
        return LoadedKimiDeltaAttention(self, weights, kernels, placement)


class LoadedKimiDeltaAttention(LoadedMixer):
    def __init__(
        self, s: KimiDeltaAttention, weights: Weights, kernels: Kernels, placement: MixerPlacement
    ) -> None:
        self.kernels, self.index = kernels, placement.state
        self.columns = [3 * s.width, *list(s.rows.values())[3:]]
        # The decays and write strengths stay unquantised: they are multiplied into the state at every token.
        exact = ("in_b", "in_a", "in_a_a")
        self.project = Linear.load(weights, kernels, s.rows, placement.reads, exact=exact)
        self.gate = self.decay = None
        if s.gate_rank is not None:
            self.gate = Linear.load(weights, kernels, {"in_z_b": s.width}, s.gate_rank)
            self.decay = Linear.load(weights, kernels, {"in_a_b": s.width}, s.gate_rank, exact=("in_a_b",))
        self.layer = DeltaLayer(
            *(s.heads, s.heads, s.head_dim, s.head_dim),
            conv_CK=load_conv(weights, 3 * s.width, s.conv),
            A_log_H=weights.take("A_log", (s.heads,), torch.float32),
            dt_bias_H=weights.take("dt_bias", (s.heads, s.head_dim), torch.float32),
            norm_W=weights.take("norm.weight", (s.head_dim,)),
            eps=s.eps,
            bound=s.bound,
            sigmoid=True,
        )
        self.out = Linear.load(weights, kernels, {"out": placement.writes}, s.width)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        ops, memory = self.kernels, step.memory.recurrent(self.index)
        projected_TN = self.project(x_TD)
        if self.gate is not None and self.decay is not None:
            qkv_TC, z_TR, b_TH, a_TR = torch.split(projected_TN, self.columns, dim=1)
            # Products and kernels need contiguous rows.
            z_TV, a_TN = self.gate(ops.concat(z_TR)), self.decay(ops.concat(a_TR))
            projected_TN = ops.concat(qkv_TC, z_TV, b_TH, a_TN)
        o_TV = step.by_group(lambda group: ops.delta_net(group.take(projected_TN), self.layer, memory, group))
        return self.out(o_TV)

    def fold(self, memory: ArenaViews, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        views = memory.recurrent(self.index)
        k_path_BPGK = self.kernels.path_keys(self.layer, views, slot_B, path, length_B)
        self.kernels.fold(views, slot_B, path, length_B, k_path_BPGK)
