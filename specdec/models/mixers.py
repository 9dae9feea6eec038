"""The layers that mix tokens: attention, gated delta net, Mamba-2. Each knows its place in the arena."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.linear.fp8 import join
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
        self, s: spec.Attention, hidden: int, weights: Weights, kernels: Kernels, index: int
    ) -> None:
        self.kernels, self.index, self.rope = kernels, index, s.rope
        norm = s.qk_norm
        self.layer = AttentionLayer(
            *(s.heads, s.kv_heads, s.head_dim, s.scale, s.gated),
            q_norm_D=take_norm(weights, "q_norm.weight", s.head_dim, norm) if norm else None,
            k_norm_D=take_norm(weights, "k_norm.weight", s.head_dim, norm) if norm else None,
            eps=norm.eps if norm else 0.0,
        )
        rows = dict(zip("qkv", self.layer.widths, strict=True))
        weight = join([weights.matrix(f"{n}.weight", (width, hidden)) for n, width in rows.items()])
        bias = (
            torch.cat([weights.take(f"{n}.bias", (width,)) for n, width in rows.items()]) if s.bias else None
        )
        self.project = kernels.pack(weight, bias)
        out_bias = weights.take("o.bias", (hidden,)) if s.bias else None
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
        self.spec, self.kernels, self.index = s, kernels, index
        self.inner, self.shared = s.heads * s.head_dim, s.groups * s.state_dim
        self.channels = self.inner + 2 * self.shared
        self.widths = [self.inner, self.channels, s.heads]
        rows = sum(self.widths)
        bias = weights.take("in.bias", (rows,)) if s.bias else None
        self.project = kernels.pack(weights.matrix("in.weight", (rows, hidden)), bias)
        self.conv_CK = take_conv(weights, self.channels, s.conv)
        self.conv_C = weights.take("conv.bias", (self.channels,)) if s.conv_bias else None
        self.A_H = -torch.exp(weights.take("A_log", (s.heads,), torch.float32))
        self.D_H = weights.take("D", (s.heads,), torch.float32)
        self.dt_bias_H = weights.take("dt_bias", (s.heads,), torch.float32)
        self.norm_N = weights.take("norm.weight", (self.inner,))
        out_bias = weights.take("out.bias", (hidden,)) if s.bias else None
        self.out = kernels.pack(weights.matrix("out.weight", (hidden, self.inner)), out_bias)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        s, ops = self.spec, self.kernels
        num_tokens, memory = x_TD.shape[0], step.memory.recurrent(self.index)
        gate_TN, xbc_TC, dt_TH = torch.split(ops.linear(x_TD, self.project), self.widths, dim=-1)
        # The keys of the paths, before the convolution takes these into its windows.
        k_path = {group.start: self._path_keys(memory, group) for group in step.window.groups}
        xbc_TC = step.by_group(
            lambda group: ops.causal_conv(group.take(xbc_TC), self.conv_CK, self.conv_C, memory, group)
        )
        dt_TH = ops.mamba_step(dt_TH, self.dt_bias_H, s.step_limit)
        x_TN, b_TN, c_TN = torch.split(xbc_TC.to(dt_TH.dtype), [self.inner, self.shared, self.shared], dim=-1)
        x_THW = x_TN.view(num_tokens, s.heads, s.head_dim)
        k_TGK = b_TN.view(num_tokens, s.groups, s.state_dim)
        q_TGK = c_TN.view(num_tokens, s.groups, s.state_dim)
        v_THW, decay_TH = dt_TH[..., None] * x_THW, dt_TH * self.A_H
        inputs = (q_TGK, k_TGK, v_THW, decay_TH)
        o_THW = step.by_group(
            lambda group: ops.recur(*map(group.take, inputs), None, memory, group, k_path[group.start])
        )
        o_TN = (o_THW + self.D_H[:, None] * x_THW).reshape(num_tokens, self.inner)
        o_TN = ops.gated_norm(o_TN, gate_TN, self.norm_N, s.eps, self.inner // s.groups, gate_first=True)
        return ops.linear(o_TN, self.out)

    def fold(self, memory: Memory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        """Bring this layer's states and windows up to date with their rows' paths, in place."""
        own = memory.recurrent(self.index)
        self.kernels.fold(own, slot_B, path, length_B, self._keys(own, slot_B, path, length_B))

    def _path_keys(self, memory: RecurrentMemory, group: Group) -> Tensor | None:
        if group.path is None or group.path_length_B is None:
            return None
        return self._keys(memory, group.state_B, group.path, group.path_length_B)

    def _keys(self, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> Tensor:
        """Return the keys [B, P, G, K] of the pending paths, made from the inputs in their records."""
        at = slice(self.inner, self.inner + self.shared)
        b_BPN = self.kernels.path_conv(self.conv_CK, self.conv_C, at, memory, slot_B, path, length_B)
        return b_BPN.view(*b_BPN.shape[:2], self.spec.groups, self.spec.state_dim)


def take_conv(weights: Weights, channels: int, taps: int) -> Tensor:
    """Load a depthwise convolution in float32, laid out [K, C]: a tap's channels are read together."""
    return weights.take("conv.weight", (channels, taps), torch.float32).t().contiguous().t()


def take_norm(weights: Weights, name: str, size: int, norm: spec.Norm) -> Tensor:
    """Load a norm's weight with its offset added, so that every norm multiplies by one vector.

    Its dtype says where the norm rounds: float32 for one that is wide, else the model's.
    """
    return weights.take(name, (size,), torch.float32 if norm.wide else None) + norm.offset
