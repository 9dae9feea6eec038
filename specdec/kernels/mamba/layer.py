"""One layer's parameters, and the operations that make it up, whichever implementation they come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory


@dataclass(frozen=True, slots=True)
class MambaLayer:
    groups: int
    heads: int
    state_dim: int
    head_dim: int
    conv_CK: Tensor
    conv_C: Tensor | None
    A_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    step_limit: tuple[float, float]
    """Bounds on the step size after softplus."""
    norm_N: Tensor
    eps: float

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Columns of what the heads of a group have in common: B, the keys, and C, the queries."""
        return self.groups * self.state_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of the gate, of x, B and C together, and of dt, in the order of the projection."""
        return self.inner, self.inner + 2 * self.shared, self.heads


class Operations(NamedTuple):
    causal_conv: Callable[..., Tensor]
    path_conv: Callable[..., Tensor]
    mamba_step: Callable[..., Tensor]
    scan_window: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]


def run(
    ops: Operations, projected_TN: Tensor, layer: MambaLayer, memory: RecurrentMemory, group: Group
) -> Tensor:
    """Return the layer's output before its last projection, in the projection's dtype."""
    gate_TN, xbc_TC, dt_TH = torch.split(projected_TN, list(layer.widths), dim=-1)
    k_path_BPGK = None
    if group.path is not None and group.path_length_B is not None:
        k_path_BPGK = mamba_keys(ops, layer, memory, group.state_B, group.path, group.path_length_B)
    xbc_TC = ops.causal_conv(xbc_TC, layer.conv_CK, layer.conv_C, memory, group)
    dt_TH = ops.mamba_step(dt_TH, layer.dt_bias_H, layer.step_limit)
    tokens, shared = len(projected_TN), layer.shared
    x_TN, b_TN, c_TN = torch.split(xbc_TC.to(dt_TH.dtype), [layer.inner, shared, shared], dim=-1)
    x_THW = x_TN.view(tokens, layer.heads, layer.head_dim)
    k_TGK = b_TN.view(tokens, layer.groups, layer.state_dim)
    q_TGK = c_TN.view(tokens, layer.groups, layer.state_dim)
    v_THW, decay_TH = dt_TH[..., None] * x_THW, dt_TH * layer.A_H
    o_THW = ops.scan_window(q_TGK, k_TGK, v_THW, decay_TH, None, memory, group, k_path_BPGK)
    o_TN = (o_THW + layer.D_H[:, None] * x_THW).reshape(tokens, layer.inner)
    size = layer.inner // layer.groups
    return ops.gated_norm(o_TN, gate_TN, layer.norm_N, layer.eps, size, gate_first=True)


def mamba_keys(
    ops: Operations,
    layer: MambaLayer,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
) -> Tensor:
    """Return the keys [B, P, G, K] of the tokens on the pending paths, as they were when these were verified.

    A key is a function of the inputs that the records hold, so no record holds it. Must run before the paths
    enter the convolution's windows. What stands behind a path's end may be anything.
    """
    channels = slice(layer.inner, layer.inner + layer.shared)
    k_BPN = ops.path_conv(layer.conv_CK, layer.conv_C, channels, memory, slot_B, path, length_B)
    return k_BPN.view(*path.slab_BN.shape, layer.groups, layer.state_dim)
