"""The layers that mix tokens: attention, gated delta net, Mamba-2. Each knows its place in the arena."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.linear.fp8 import join
from specdec.kernels.mamba.layer import MambaLayer
from specdec.kernels.self_attention.layer import AttentionLayer
from specdec.kernels.table import Kernels
from specdec.models import spec
from specdec.models.weights import Weights
from specdec.state_slots.window import Window


class Memory(Protocol):
    """The arena's views, by the running number of the attention or recurrent layer."""

    def pages(self, layer: int) -> Tensor: ...

    def recurrent(self, layer: int) -> RecurrentMemory: ...


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares."""

    window: Window
    memory: Memory
    rope: Mapping[spec.Rope, tuple[Tensor, Tensor]]
    kernels: Kernels

    def by_group(self, run: Callable[[Group], Tensor]) -> Tensor:
        """Run an operation on each group and put the results back in packed order."""
        groups = self.window.groups
        return run(groups[0]) if len(groups) == 1 else torch.cat([run(group) for group in groups])


class Attention:
    def __init__(
        self,
        s: spec.Attention,
        hidden: int,
        weights: Weights,
        kernels: Kernels,
        index: int,
        *,
        reads: int | None = None,
    ) -> None:
        """Build a layer that writes `hidden` wide, and reads as wide where `reads` says nothing else."""
        self.kernels, self.index, self.rope = kernels, index, s.rope
        norm = s.qk_norm
        self.layer = AttentionLayer(
            *(s.heads, s.kv_heads, s.head_dim, s.scale, s.gated),
            q_norm_D=take_norm(weights, "q_norm.weight", s.head_dim, norm) if norm else None,
            k_norm_D=take_norm(weights, "k_norm.weight", s.head_dim, norm) if norm else None,
            eps=norm.eps if norm else 0.0,
        )
        rows = dict(zip("qkv", self.layer.widths, strict=True))
        weight = join([weights.matrix(f"{n}.weight", (width, reads or hidden)) for n, width in rows.items()])
        bias = (
            torch.cat([weights.take(f"{n}.bias", (width,)) for n, width in rows.items()]) if s.bias else None
        )
        self.project = kernels.pack(weight, bias)
        out_bias = weights.take("o.bias", (hidden,)) if s.bias and s.out_bias else None
        self.out = kernels.pack(weights.matrix("o.weight", (hidden, s.heads * s.head_dim)), out_bias)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        ops, pages = self.kernels, step.memory.pages(self.index)
        projected_TN = ops.linear(x_TD, self.project)
        rotation = step.rope[self.rope] if self.rope else None

        def attend(group: Group) -> Tensor:
            own = (group.take(rotation[0]), group.take(rotation[1])) if rotation else None
            return ops.self_attention(group.take(projected_TN), self.layer, own, pages, group)

        return ops.linear(step.by_group(attend), self.out)


class GatedDeltaNet:
    def __init__(
        self, s: spec.GatedDeltaNet, hidden: int, weights: Weights, kernels: Kernels, index: int
    ) -> None:
        self.kernels, self.index = kernels, index
        key, value = s.key_heads * s.key_dim, s.value_heads * s.value_dim
        channels = 2 * key + value
        large = [
            weights.matrix("in_qkv.weight", (channels, hidden)),
            weights.matrix("in_z.weight", (value, hidden)),
        ]
        # The gates stay exact: what they decide is multiplied into the state at every token.
        gates = [weights.take(f"in_{n}.weight", (s.value_heads, hidden)) for n in "ba"]
        self.project = kernels.pack(join([*large, *gates]))
        self.layer = DeltaLayer(
            *(s.key_heads, s.value_heads, s.key_dim, s.value_dim),
            conv_CK=take_conv(weights, channels, s.conv),
            A_log_H=weights.take("A_log", (s.value_heads,), torch.float32),
            dt_bias_H=weights.take("dt_bias", (s.value_heads,), torch.float32),
            norm_W=weights.take("norm.weight", (s.value_dim,)),
            eps=s.eps,
        )
        self.out = kernels.pack(weights.matrix("out.weight", (hidden, value)))

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        ops, memory = self.kernels, step.memory.recurrent(self.index)
        projected_TN = ops.linear(x_TD, self.project)
        o_TV = step.by_group(lambda group: ops.delta_net(group.take(projected_TN), self.layer, memory, group))
        return ops.linear(o_TV, self.out)

    def fold(self, memory: Memory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        """Bring this layer's states and windows up to date with their rows' paths, in place."""
        own = memory.recurrent(self.index)
        k_path_BPGK = self.kernels.path_keys(self.layer, own, slot_B, path, length_B)
        self.kernels.fold(own, slot_B, path, length_B, k_path_BPGK)


class Mamba2:
    def __init__(self, s: spec.Mamba2, hidden: int, weights: Weights, kernels: Kernels, index: int) -> None:
        self.kernels, self.index = kernels, index
        inner = s.heads * s.head_dim
        channels = inner + 2 * s.groups * s.state_dim
        rows = inner + channels + s.heads
        bias = weights.take("in.bias", (rows,)) if s.bias else None
        self.project = kernels.pack(weights.matrix("in.weight", (rows, hidden)), bias)
        self.layer = MambaLayer(
            *(s.groups, s.heads, s.state_dim, s.head_dim),
            conv_CK=take_conv(weights, channels, s.conv),
            conv_C=weights.take("conv.bias", (channels,)) if s.conv_bias else None,
            A_H=-torch.exp(weights.take("A_log", (s.heads,), torch.float32)),
            D_H=weights.take("D", (s.heads,), torch.float32),
            dt_bias_H=weights.take("dt_bias", (s.heads,), torch.float32),
            step_limit=s.step_limit,
            norm_N=weights.take("norm.weight", (inner,)),
            eps=s.eps,
        )
        out_bias = weights.take("out.bias", (hidden,)) if s.bias else None
        self.out = kernels.pack(weights.matrix("out.weight", (hidden, inner)), out_bias)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        ops, memory = self.kernels, step.memory.recurrent(self.index)
        projected_TN = ops.linear(x_TD, self.project)
        o_TN = step.by_group(lambda group: ops.mamba(group.take(projected_TN), self.layer, memory, group))
        return ops.linear(o_TN, self.out)

    def fold(self, memory: Memory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        """Bring this layer's states and windows up to date with their rows' paths, in place."""
        own = memory.recurrent(self.index)
        k_path_BPGK = self.kernels.mamba_keys(self.layer, own, slot_B, path, length_B)
        self.kernels.fold(own, slot_B, path, length_B, k_path_BPGK)


def take_conv(weights: Weights, channels: int, taps: int) -> Tensor:
    """Load a depthwise convolution in float32, laid out [K, C]: a tap's channels are read together."""
    return weights.take("conv.weight", (channels, taps), torch.float32).t().contiguous().t()


def take_norm(weights: Weights, name: str, size: int, norm: spec.Norm) -> Tensor:
    """Load a norm's weight with its offset added, so that every norm multiplies by one vector.

    Its dtype says where the norm rounds: float32 for one that is wide, else the model's.
    """
    return weights.take(name, (size,), torch.float32 if norm.wide else None) + norm.offset
