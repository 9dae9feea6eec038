"""Mamba-2 between its projections, composed of operations."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.conv import cpu as conv_cpu
from specdec.kernels.conv import reference as conv_reference
from specdec.kernels.gates import cpu as gates_cpu
from specdec.kernels.gates import reference as gates_reference
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.mamba.layer import MambaLayer
from specdec.kernels.norm import cpu as norm_cpu
from specdec.kernels.norm import reference as norm_reference
from specdec.kernels.recurrence import cpu as recurrence_cpu
from specdec.kernels.recurrence import reference as recurrence_reference


class ComposedMamba(NamedTuple):
    """The operations of one implementation and their composition."""

    causal_conv: Callable[[Tensor, Tensor, Tensor | None, RecurrentMemory, Group], Tensor]
    path_conv: Callable[[Tensor, Tensor | None, slice, RecurrentMemory, Tensor, RecordIds, Tensor], Tensor]
    mamba_step: Callable[[Tensor, Tensor, tuple[float, float]], Tensor]
    scan_window: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor | None, RecurrentMemory, Group, Tensor | None], Tensor
    ]
    gated_norm: Callable[..., Tensor]

    def mamba(self, projected_TN: Tensor, layer: MambaLayer, memory: RecurrentMemory, group: Group) -> Tensor:
        """Return the layer's output before its last projection, in the projection's dtype."""
        gate_TN, xbc_TC, dt_TH = torch.split(projected_TN, list(layer.widths), dim=-1)
        k_path_BPGK = None
        if group.path is not None and group.path_length_B is not None:
            k_path_BPGK = self.mamba_keys(layer, memory, group.state_B, group.path, group.path_length_B)
        xbc_TC = self.causal_conv(xbc_TC, layer.conv_CK, layer.conv_C, memory, group)
        dt_TH = self.mamba_step(dt_TH, layer.dt_bias_H, layer.step_limit)
        tokens, shared = len(projected_TN), layer.shared
        x_TN, b_TN, c_TN = torch.split(xbc_TC.to(dt_TH.dtype), [layer.inner, shared, shared], dim=-1)
        x_THW = x_TN.view(tokens, layer.heads, layer.head_dim)
        k_TGK = b_TN.view(tokens, layer.groups, layer.state_dim)
        q_TGK = c_TN.view(tokens, layer.groups, layer.state_dim)
        v_THW, decay_TH = dt_TH[..., None] * x_THW, dt_TH * layer.A_H
        o_THW = self.scan_window(q_TGK, k_TGK, v_THW, decay_TH, None, memory, group, k_path_BPGK)
        o_TN = (o_THW + layer.D_H[:, None] * x_THW).reshape(tokens, layer.inner)
        size = layer.inner // layer.groups
        return self.gated_norm(o_TN, gate_TN, layer.norm_N, layer.eps, size, gate_first=layer.gate_first)

    def mamba_keys(
        self, layer: MambaLayer, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor
    ) -> Tensor:
        """Return the keys [B, P, G, K] of the tokens on the pending paths, bit-identical to verification.

        Keys are recomputed from the recorded inputs, so no record stores them. Must run before the paths
        enter the convolution's windows. Entries behind a path's end are undefined.
        """
        channels = slice(layer.inner, layer.inner + layer.shared)
        k_BPN = self.path_conv(layer.conv_CK, layer.conv_C, channels, memory, slot_B, path, length_B)
        return k_BPN.view(*path.slab_BN.shape, layer.groups, layer.state_dim)


REFERENCE = ComposedMamba(
    conv_reference.causal_conv,
    conv_reference.path_conv,
    gates_reference.mamba_step,
    recurrence_reference.scan_window,
    norm_reference.gated_norm,
)
CPU = ComposedMamba(
    conv_cpu.causal_conv,
    conv_cpu.path_conv,
    gates_cpu.mamba_step,
    recurrence_cpu.scan_window,
    norm_cpu.gated_norm,
)
