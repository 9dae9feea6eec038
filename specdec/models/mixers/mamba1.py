"""Mamba-1: each channel has its own state and step size, after a short convolution."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.selective_scan.layer import SelectiveLayer
from specdec.kernels.table import Kernels
from specdec.models.linear import Linear
from specdec.models.mixers.base import ArenaViews, LoadedMixer, Mixer, MixerPlacement, Step, load_conv
from specdec.models.weights import Weights
from specdec.state_slots.layout import StateShape


@dataclass(frozen=True, slots=True)
class Mamba1(Mixer):
    inner: int
    state_dim: int
    rank: int
    """Rank of the step size projection."""
    conv: int
    conv_bias: bool
    bias: bool
    norms: Literal["", "bare", "weighted"] = ""
    """Norm of the rank, B and C: none, without weights, or with weights."""
    eps: float = 1e-6
    heads: int = 1
    """Parts of the channels; each computes step sizes, keys and queries from its own inputs."""

    kind: ClassVar[str] = "Mamba-1"

    @property
    def selected(self) -> Mapping[str, int]:
        """Widths of the projection of a head's convolved inputs: the rank, B (keys) and C (queries)."""
        return {"dt": self.rank, "b": self.state_dim, "c": self.state_dim}

    def state_shape(self) -> StateShape:
        """Return the state's shape; records store the step size as the update, and the key as the decay."""
        shape = (self.heads, self.state_dim, self.inner // self.heads, self.conv - 1, self.inner)
        return StateShape(*shape, decay_dim=self.state_dim, runs=((self.inner, 1),))

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {
            "mamba in": (2 * self.inner, hidden),
            "mamba x": (self.heads * sum(self.selected.values()), self.inner // self.heads),
            "mamba dt": (self.inner, self.rank),
            "mamba out": (hidden, self.inner),
        }

    def token_flops(self) -> float:
        """Return the FLOPs of the convolution, and of the state's decay, update and read."""
        return 2.0 * self.conv * self.inner + 7.0 * self.inner * self.state_dim

    def build(self, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> "LoadedMamba1":
        return LoadedMamba1(self, weights, kernels, placement)


class LoadedMamba1(LoadedMixer):
    def __init__(self, s: Mamba1, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> None:
        self.spec, self.kernels, self.index = s, kernels, placement.state
        self.project = Linear.load(weights, kernels, {"in": 2 * s.inner}, placement.reads, bias=s.bias)
        self.conv_CK = load_conv(weights, s.inner, s.conv)
        self.conv_C = weights.take("conv.bias", (s.inner,)) if s.conv_bias else None
        # Not quantised: decays depend on these.
        x_NW = weights.take("x.weight", (s.heads * sum(s.selected.values()), s.inner // s.heads))
        dt_CR = weights.take("dt.weight", (s.inner, s.rank))
        self.select, self.widen = (
            [Linear(kernels, part) for part in weight.chunk(s.heads)] for weight in (x_NW, dt_CR)
        )
        A_NK = -torch.exp(weights.take("A_log", (s.inner, s.state_dim), torch.float32))
        D_C, dt_bias_C = (weights.take(name, (s.inner,), torch.float32) for name in ("D", "dt_bias"))
        self.layer = SelectiveLayer(
            A_NK.reshape(s.heads, -1, s.state_dim).mT.contiguous(),
            *(own_C.reshape(s.heads, -1) for own_C in (D_C, dt_bias_C)),
        )
        self.norm_D = {name: _norm(s, weights, name, A_NK) for name in s.selected}
        self.out = Linear.load(weights, kernels, {"out": placement.writes}, s.inner, bias=s.bias)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        memory, projected_TN = step.memory.recurrent(self.index), self.project(x_TD)
        return self.out(step.by_group(lambda group: self._mix(group.take(projected_TN), memory, group)))

    def _mix(self, projected_TN: Tensor, memory: RecurrentMemory, group: Group) -> Tensor:
        ops, heads, x_path_BPHW = self.kernels, self.spec.heads, None
        x_TC, gate_TC = projected_TN.chunk(2, dim=1)
        if group.path is not None and group.path_length_B is not None:
            # Before the path enters the window.
            x_path_BPHW = self._inputs(memory, group.state_B, group.path, group.path_length_B)
        x_TC = ops.causal_conv(x_TC, self.conv_CK, self.conv_C, memory, group)
        selected = [self._select(h, x_TW) for h, x_TW in enumerate(x_TC.chunk(heads, dim=1))]
        parts_TN = (
            heads_TN[0] if heads == 1 else ops.concat(*heads_TN) for heads_TN in zip(*selected, strict=True)
        )
        x_THW, gate_THW, dt_THW, k_THK, q_THK = (
            part_TN.view(len(part_TN), heads, part_TN.shape[1] // heads)
            for part_TN in (x_TC, gate_TC, *parts_TN)
        )
        inputs = x_THW, gate_THW, dt_THW, k_THK, q_THK
        out_THW = ops.selective_scan(*inputs, self.layer, memory, group, x_path_BPHW)
        return out_THW.flatten(1)

    def _select(self, head: int, x_TW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the step sizes, keys and queries of a head from its convolved inputs."""
        s, ops = self.spec, self.kernels
        selected = torch.split(self.select[head](x_TW), list(s.selected.values()), dim=1)
        low_TR, k_TK, q_TK = (
            part if norm_D is None else ops.rms_norm(part, norm_D, s.eps)
            for part, norm_D in zip(selected, self.norm_D.values(), strict=True)
        )
        return self.widen[head](low_TR), k_TK, q_TK

    def _inputs(self, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> Tensor:
        """Recompute the convolved inputs of pending paths from their records."""
        conv_args = self.conv_CK, self.conv_C, slice(0, self.spec.inner)
        x_path_BPC = self.kernels.path_conv(*conv_args, memory, slot_B, path, length_B)
        rows, longest, channels = x_path_BPC.shape
        return x_path_BPC.view(rows, longest, self.spec.heads, channels // self.spec.heads)

    def fold(self, memory: ArenaViews, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        views = memory.recurrent(self.index)
        x_path_BPHW = self._inputs(views, slot_B, path, length_B)
        self.kernels.fold_selective(self.layer, views, slot_B, path, length_B, x_path_BPHW)


def _norm(s: Mamba1, weights: Weights, name: str, like: Tensor) -> Tensor | None:
    """Load the norm of a selected part, ones for a norm without weights, or None."""
    size = s.selected[name]
    if s.norms == "weighted":
        return weights.take(f"{name}_norm.weight", (size,))
    return like.new_ones(size) if s.norms else None
