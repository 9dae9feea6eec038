"""A gated short convolution: C ⊙ conv(B ⊙ h); its only memory is the window of its last inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from specdec.kernels.group import RecordIds
from specdec.kernels.table import Kernels
from specdec.models.cut import ADDED_ONCE, Cut, columns, divided, rows
from specdec.models.linear import Linear
from specdec.models.mixers.base import ArenaViews, LoadedMixer, Mixer, MixerPlacement, Step, load_conv
from specdec.models.weights import Weights
from specdec.state_slots.layout import StateShape


@dataclass(frozen=True, slots=True)
class ShortConv(Mixer):
    channels: int
    conv: int
    bias: bool
    """Biases of both projections and of the convolution."""

    kind: ClassVar[str] = "short convolution"

    def state_shape(self) -> StateShape:
        """Return a shape without a state: the window holds the last inputs B ⊙ h, a record one of them."""
        return StateShape(0, 0, 0, self.conv - 1, self.channels, runs=((self.channels, 1),))

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {"conv in": (3 * self.channels, hidden), "conv out": (hidden, self.channels)}

    def token_flops(self) -> float:
        """Return the FLOPs of the convolution and its two gates."""
        return (2.0 * self.conv + 2.0) * self.channels

    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Divide the channels."""
        own = rows(self.channels)
        return replace(self, channels=divided(self.channels, ranks, "channels of a short convolution")), {
            **dict.fromkeys(("in.weight", "in.bias"), rows(*(self.channels,) * 3)),
            **dict.fromkeys(("conv.weight", "conv.bias"), own),
            "out.weight": columns(self.channels),
            "out.bias": ADDED_ONCE,
        }

    def build(self, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> "LoadedShortConv":
        return LoadedShortConv(self, weights, kernels, placement)


class LoadedShortConv(LoadedMixer):
    def __init__(self, s: ShortConv, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> None:
        self.kernels, self.index = kernels, placement.state
        self.project = Linear.load(weights, kernels, {"in": 3 * s.channels}, placement.reads, bias=s.bias)
        self.conv_CK = load_conv(weights, s.channels, s.conv)
        self.conv_C = weights.take("conv.bias", (s.channels,)) if s.bias else None
        self.out = Linear.load(weights, kernels, {"out": placement.writes}, s.channels, bias=s.bias)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        conv, memory = self.kernels.causal_conv, step.memory.recurrent(self.index)
        b_TC, c_TC, h_TC = self.project(x_TD).chunk(3, dim=-1)
        input_TC = b_TC * h_TC
        y_TC = step.by_group(
            lambda group: conv(group.take(input_TC), self.conv_CK, self.conv_C, memory, group, silu=False)
        )
        return self.out(c_TC * y_TC)

    def fold(self, memory: ArenaViews, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        self.kernels.fold(memory.recurrent(self.index), slot_B, path, length_B, None)
