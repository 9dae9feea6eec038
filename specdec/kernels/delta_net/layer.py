"""One layer's parameters, and the operations that make it up, whichever implementation they come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_CK: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    norm_W: Tensor
    eps: float

    @property
    def widths(self) -> tuple[int, int, int, int, int, int]:
        """Columns of q, k, v, z, b and a, in the order of the projection."""
        key, value = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return key, key, value, value, self.value_heads, self.value_heads


class Operations(NamedTuple):
    causal_conv: Callable[..., Tensor]
    path_conv: Callable[..., Tensor]
    l2_normalise: Callable[..., Tensor]
    delta_gates: Callable[..., tuple[Tensor, Tensor]]
    scan_window: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]


def run(
    ops: Operations, projected_TN: Tensor, layer: DeltaLayer, memory: RecurrentMemory, group: Group
) -> Tensor:
    """Return the layer's output before its last projection, in the projection's dtype."""
    key, _, value, _, heads, _ = layer.widths
    qkv_TC, z_TV, b_TH, a_TH = torch.split(projected_TN, [2 * key + value, value, heads, heads], dim=-1)
    k_path_BPGK = None
    if group.path is not None and group.path_length_B is not None:
        k_path_BPGK = path_keys(ops, layer, memory, group.state_B, group.path, group.path_length_B)
    qkv_TC = ops.causal_conv(qkv_TC, layer.conv_CK, None, memory, group)
    q_TN, k_TN, v_TN = torch.split(qkv_TC, [key, key, value], dim=-1)
    tokens = len(projected_TN)
    q_TGK = ops.l2_normalise(q_TN.view(tokens, layer.key_heads, -1), layer.key_dim**-0.5)
    k_TGK = ops.l2_normalise(k_TN.view(tokens, layer.key_heads, -1), 1.0)
    v_THW = v_TN.view(tokens, heads, -1).to(q_TGK.dtype)
    decay_TH, beta_TH = ops.delta_gates(b_TH, a_TH, layer.A_log_H, layer.dt_bias_H)
    o_THW = ops.scan_window(q_TGK, k_TGK, v_THW, decay_TH, beta_TH, memory, group, k_path_BPGK)
    return ops.gated_norm(o_THW.flatten(1), z_TV, layer.norm_W, layer.eps, layer.value_dim, gate_first=False)


def path_keys(
    ops: Operations,
    layer: DeltaLayer,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
) -> Tensor:
    """Return the keys [B, P, G, K] of the tokens on the pending paths, as they were when these were verified.

    A key is a function of the inputs that the records hold, so no record holds it. Must run before the paths
    enter the convolution's windows. What stands behind a path's end may be anything.
    """
    key, _, _, _, _, _ = layer.widths
    channels = slice(key, 2 * key)
    k_BPN = ops.path_conv(layer.conv_CK, None, channels, memory, slot_B, path, length_B)
    k_NGK = ops.l2_normalise(k_BPN.view(-1, layer.key_heads, layer.key_dim), 1.0)
    return k_NGK.view(*path.slab_BN.shape, layer.key_heads, layer.key_dim)
