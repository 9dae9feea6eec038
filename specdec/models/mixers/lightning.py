"""Lightning attention: S ← e^{-s} S + k vᵀ and o = Sᵀ q, where the decay s of a head is a constant."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.table import Kernels
from specdec.models.linear import Linear
from specdec.models.mixers.base import ArenaViews, LoadedMixer, Mixer, MixerPlacement, Step
from specdec.models.weights import Weights
from specdec.state_slots.layout import StateShape


@dataclass(frozen=True, slots=True)
class Lightning(Mixer):
    heads: int
    head_dim: int
    decay_scale: float
    """Layer-specific factor of all heads' decays."""
    eps: float

    kind: ClassVar[str] = "lightning attention"

    @property
    def inner(self) -> int:
        """Columns each of queries, keys, values and the output gate."""
        return self.heads * self.head_dim

    def state_shape(self) -> StateShape:
        """Return the state's shape; keys are recorded as inputs of a one-tap convolution without a window."""
        runs = ((self.heads, self.head_dim),)
        return StateShape(self.heads, self.head_dim, self.head_dim, 0, self.inner, runs=runs)

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {"lightning in": (4 * self.inner, hidden), "lightning out": (hidden, self.inner)}

    def token_flops(self) -> float:
        """Return the FLOPs of the state's decay, update and read."""
        return 5.0 * self.inner * self.head_dim

    def log_decays(self) -> Tensor:
        """Return -s of each head: a geometric series that ends at 2^-8, scaled."""
        exponent_H = torch.arange(1, self.heads + 1, dtype=torch.float64) * (-8 / self.heads)
        return -self.decay_scale * torch.exp2(exponent_H)

    def build(self, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> "LoadedLightning":
        return LoadedLightning(self, weights, kernels, placement)


class LoadedLightning(LoadedMixer):
    def __init__(self, s: Lightning, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> None:
        self.spec, self.kernels, self.index = s, kernels, placement.state
        # The first projection's rows are [k | q | v], each with its heads concatenated.
        rows = {"in": 3 * s.inner, "gate": s.inner}
        self.project = Linear.load(weights, kernels, rows, placement.reads)
        self.norm_N = weights.take("norm.weight", (s.inner,))
        norm_dtype = torch.promote_types(self.norm_N.dtype, torch.float32)
        self.decay_H = s.log_decays().to(self.norm_N.device, norm_dtype)
        self.tap_C1 = torch.ones(s.inner, 1, device=self.norm_N.device)
        self.out = Linear.load(weights, kernels, {"out": placement.writes}, s.inner)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        s, ops, memory = self.spec, self.kernels, step.memory.recurrent(self.index)
        k_TN, qv_TN, gate_TN = torch.split(self.project(x_TD), [s.inner, 2 * s.inner, s.inner], dim=1)
        # Gating ones with silu computes silu, in every backend.
        qv_TN = ops.gated_norm(torch.ones_like(qv_TN), qv_TN, None, 0.0, s.head_dim, gate_first=True)
        o_TN = step.by_group(lambda group: self._mix(group.take(k_TN), group.take(qv_TN), memory, group))
        return self.out(
            ops.gated_norm(o_TN, gate_TN, self.norm_N, s.eps, s.inner, gate_first=False, sigmoid=True)
        )

    def _mix(self, k_TN: Tensor, qv_TN: Tensor, memory: RecurrentMemory, group: Group) -> Tensor:
        s, k_path_BPHK = self.spec, None
        if group.path is not None and group.path_length_B is not None:
            k_path_BPHK = self._keys(memory, group.state_B, group.path, group.path_length_B)
        # A one-tap convolution reads only the node itself, in a tree as in a chain.
        k_TN = self.kernels.causal_conv(k_TN, self.tap_C1, None, memory, replace(group, tap_BMC=None))
        q_THK, k_THK, v_THW = (
            part_TN.to(self.decay_H.dtype).reshape(-1, s.heads, s.head_dim)
            for part_TN in (qv_TN[:, : s.inner], k_TN, qv_TN[:, s.inner :])
        )
        decay_TH = self.decay_H.expand(len(q_THK), -1)
        o_THW = self.kernels.scan_window(q_THK, k_THK, v_THW, decay_TH, None, memory, group, k_path_BPHK)
        return o_THW.flatten(1)

    def _keys(self, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> Tensor:
        """Recompute the keys of pending paths from their records."""
        channels = slice(0, self.spec.inner)
        k_BPN = self.kernels.path_conv(self.tap_C1, None, channels, memory, slot_B, path, length_B)
        return k_BPN.view(*path.slab_BN.shape, self.spec.heads, self.spec.head_dim)

    def fold(self, memory: ArenaViews, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        views = memory.recurrent(self.index)
        self.kernels.fold(views, slot_B, path, length_B, self._keys(views, slot_B, path, length_B))
