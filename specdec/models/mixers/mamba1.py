"""Mamba-1: each channel has a state of its own and a step size of its own, behind a short convolution."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.selective_scan.layer import SelectiveLayer
from specdec.kernels.table import Kernels
from specdec.models.linear import Linear
from specdec.models.mixers.base import LoadedMixer, Memory, Mixer, Place, Step, load_conv
from specdec.models.weights import Weights
from specdec.state_slots.layout import StateShape


@dataclass(frozen=True, slots=True)
class Mamba1(Mixer):
    inner: int
    state_dim: int
    rank: int
    """Width that step sizes are made from."""
    conv: int
    conv_bias: bool
    bias: bool
    norms: Literal["", "bare", "weighted"] = ""
    """How the rank, B and C are normalised before use, if they are: without weights, or with."""
    eps: float = 1e-6

    kind: ClassVar[str] = "Mamba-1"

    @property
    def selected(self) -> Mapping[str, int]:
        """Name what the convolved inputs are projected to: the rank, B (keys) and C (queries)."""
        return {"dt": self.rank, "b": self.state_dim, "c": self.state_dim}

    def state_shape(self) -> StateShape:
        """Keep the step size in records where others keep what they write, and the key for the decays."""
        shape = (1, self.state_dim, self.inner, self.conv - 1, self.inner)
        return StateShape(*shape, decay_dim=self.state_dim)

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {
            "mamba in": (2 * self.inner, hidden),
            "mamba x": (sum(self.selected.values()), self.inner),
            "mamba dt": (self.inner, self.rank),
            "mamba out": (hidden, self.inner),
        }

    def token_flops(self) -> float:
        """Count the convolution, and decay, update and reading of the state."""
        return 2.0 * self.conv * self.inner + 7.0 * self.inner * self.state_dim

    def build(self, weights: Weights, kernels: Kernels, place: Place) -> "LoadedMamba1":
        return LoadedMamba1(self, weights, kernels, place)


class LoadedMamba1(LoadedMixer):
    def __init__(self, s: Mamba1, weights: Weights, kernels: Kernels, place: Place) -> None:
        self.spec, self.kernels, self.index = s, kernels, place.state
        self.project = Linear.load(weights, kernels, {"in": 2 * s.inner}, place.reads, bias=s.bias)
        self.conv_CK = load_conv(weights, s.inner, s.conv)
        self.conv_C = weights.take("conv.bias", (s.inner,)) if s.conv_bias else None
        # What decays follow from is not rounded.
        self.select = Linear.load(weights, kernels, {"x": sum(s.selected.values())}, s.inner, exact=("x",))
        self.widen = Linear.load(weights, kernels, {"dt": s.inner}, s.rank, exact=("dt",))
        A_NK = -torch.exp(weights.take("A_log", (s.inner, s.state_dim), torch.float32))
        self.layer = SelectiveLayer(
            A_NK.t().contiguous()[None],
            weights.take("D", (s.inner,), torch.float32)[None],
            weights.take("dt_bias", (s.inner,), torch.float32)[None],
        )
        self.norm_D = {name: _norm(s, weights, name, A_NK) for name in s.selected}
        self.out = Linear.load(weights, kernels, {"out": place.writes}, s.inner, bias=s.bias)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        memory, projected_TN = step.memory.recurrent(self.index), self.project(x_TD)
        return self.out(step.by_group(lambda group: self._mix(group.take(projected_TN), memory, group)))

    def _mix(self, projected_TN: Tensor, memory: RecurrentMemory, group: Group) -> Tensor:
        ops, sizes, x_path_BPHW = self.kernels, list(self.spec.selected.values()), None
        x_TC, gate_TC = projected_TN.chunk(2, dim=1)
        if group.path is not None and group.path_length_B is not None:
            # Before the path enters the window.
            x_path_BPHW = self._inputs(memory, group.state_B, group.path, group.path_length_B)
        x_TC = ops.causal_conv(x_TC, self.conv_CK, self.conv_C, memory, group)
        selected = torch.split(self.select(x_TC), sizes, dim=1)
        low_TR, k_TK, q_TK = (
            part if norm_D is None else ops.rms_norm(part, norm_D, self.spec.eps)
            for part, norm_D in zip(selected, self.norm_D.values(), strict=True)
        )
        x_T1W, gate_T1W, dt_T1W = (part[:, None] for part in (x_TC, gate_TC, self.widen(low_TR)))
        out_T1W = ops.selective_scan(
            *(x_T1W, gate_T1W, dt_T1W, k_TK[:, None], q_TK[:, None]),
            *(self.layer, memory, group, x_path_BPHW),
        )
        return out_T1W.flatten(1)

    def _inputs(self, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> Tensor:
        """Make the convolved inputs of pending paths again, from what their records hold."""
        channels = slice(0, self.spec.inner)
        return self.kernels.path_conv(self.conv_CK, self.conv_C, channels, memory, slot_B, path, length_B)[
            :, :, None
        ]

    def fold(self, memory: Memory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        own = memory.recurrent(self.index)
        x_path_BPHW = self._inputs(own, slot_B, path, length_B)
        self.kernels.fold_selective(self.layer, own, slot_B, path, length_B, x_path_BPHW)


def _norm(s: Mamba1, weights: Weights, name: str, like: Tensor) -> Tensor | None:
    """Load the norm of what is selected; one without weights multiplies by one."""
    size = s.selected[name]
    if s.norms == "weighted":
        return weights.take(f"{name}_norm.weight", (size,))
    return like.new_ones(size) if s.norms else None
