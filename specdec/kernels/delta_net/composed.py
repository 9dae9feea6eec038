"""A gated delta net between its projections, composed of operations."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.conv import cpu as conv_cpu
from specdec.kernels.conv import reference as conv_reference
from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.gates import cpu as gates_cpu
from specdec.kernels.gates import reference as gates_reference
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.norm import cpu as norm_cpu
from specdec.kernels.norm import reference as norm_reference
from specdec.kernels.recurrence import cpu as recurrence_cpu
from specdec.kernels.recurrence import reference as recurrence_reference


class ComposedDeltaNet(NamedTuple):
    """The operations of one implementation and their composition."""

    causal_conv: Callable[[Tensor, Tensor, Tensor | None, RecurrentMemory, Group], Tensor]
    path_conv: Callable[[Tensor, Tensor | None, slice, RecurrentMemory, Tensor, RecordIds, Tensor], Tensor]
    l2_normalise: Callable[[Tensor, float | Tensor], Tensor]
    delta_gates: Callable[[Tensor, Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]
    scan_window: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor | None, RecurrentMemory, Group, Tensor | None], Tensor
    ]
    gated_norm: Callable[..., Tensor]

    def delta_net(
        self, projected_TN: Tensor, layer: DeltaLayer, memory: RecurrentMemory, group: Group
    ) -> Tensor:
        """Return the layer's output before its last projection, in the projection's dtype."""
        key, _, value, _, heads, decays = layer.widths
        qkv_TC, z_TV, b_TH, a_TH = torch.split(projected_TN, [2 * key + value, value, heads, decays], dim=-1)
        k_path_BPGK = None
        if group.path is not None and group.path_length_B is not None:
            k_path_BPGK = self.path_keys(layer, memory, group.state_B, group.path, group.path_length_B)
        qkv_TC = self.causal_conv(qkv_TC, layer.conv_CK, None, memory, group)
        q_TN, k_TN, v_TN = torch.split(qkv_TC, [key, key, value], dim=-1)
        tokens = len(projected_TN)
        q_TGK = self.l2_normalise(q_TN.view(tokens, layer.key_heads, -1), layer.key_dim**-0.5)
        k_TGK = self.l2_normalise(k_TN.view(tokens, layer.key_heads, -1), 1.0)
        v_THW = v_TN.view(tokens, heads, -1).to(q_TGK.dtype)
        decay_TH, beta_TH = self.delta_gates(b_TH, a_TH, layer.A_log_H, layer.dt_bias_H, layer.bound)
        if layer.beta_scale != 1:
            beta_TH = beta_TH * layer.beta_scale
        o_THW = self.scan_window(q_TGK, k_TGK, v_THW, decay_TH, beta_TH, memory, group, k_path_BPGK)
        return self.gated_norm(
            *(o_THW.flatten(1), z_TV, layer.norm_W, layer.eps, layer.value_dim),
            gate_first=False,
            sigmoid=layer.sigmoid,
        )

    def path_keys(
        self, layer: DeltaLayer, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor
    ) -> Tensor:
        """Return the keys [B, P, G, K] of the tokens on the pending paths, bit-identical to verification.

        Keys are recomputed from the recorded inputs, so no record stores them. Must run before the paths
        enter the convolution's windows. Entries behind a path's end are undefined.
        """
        key, _, _, _, _, _ = layer.widths
        channels = slice(key, 2 * key)
        k_BPN = self.path_conv(layer.conv_CK, None, channels, memory, slot_B, path, length_B)
        k_NGK = self.l2_normalise(k_BPN.view(-1, layer.key_heads, layer.key_dim), 1.0)
        return k_NGK.view(*path.slab_BN.shape, layer.key_heads, layer.key_dim)


REFERENCE = ComposedDeltaNet(
    conv_reference.causal_conv,
    conv_reference.path_conv,
    gates_reference.l2_normalise,
    gates_reference.delta_gates,
    recurrence_reference.scan_window,
    norm_reference.gated_norm,
)
CPU = ComposedDeltaNet(
    conv_cpu.causal_conv,
    conv_cpu.path_conv,
    gates_cpu.l2_normalise,
    gates_cpu.delta_gates,
    recurrence_cpu.scan_window,
    norm_cpu.gated_norm,
)
