"""An attention layer between its projections, composed of operations."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.attention import cpu as attention_cpu
from specdec.kernels.attention import reference as attention_reference
from specdec.kernels.group import Group
from specdec.kernels.norm import cpu as norm_cpu
from specdec.kernels.norm import reference as norm_reference
from specdec.kernels.rope import cpu as rope_cpu
from specdec.kernels.rope import reference as rope_reference
from specdec.kernels.self_attention.layer import AttentionLayer, Rotation


class ComposedAttention(NamedTuple):
    """The operations of one implementation and their composition."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    append: Callable[[Tensor, Tensor | None, Tensor, Group], None]
    attend: Callable[[Tensor, Tensor, Group, float, int | None, int | None], Tensor]

    def self_attention(
        self,
        projected_TN: Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None,
        pages: Tensor,
        group: Group,
    ) -> Tensor:
        """Return the layer's output before its last projection; appends keys and values to the pages."""
        tokens = projected_TN.shape[0]
        q_TN, k_TN, v_TN = torch.split(projected_TN, layer.widths, dim=-1)
        q_THD, gate_THD = q_TN.view(tokens, layer.heads, -1), None
        if layer.gated:
            q_THD, gate_THD = q_THD.chunk(2, dim=-1)
        k_TJD = k_TN.view(tokens, layer.kv_heads, layer.head_dim)
        v_TJD = v_TN.view(k_TJD.shape) if layer.value_dim is None else None
        if layer.q_norm_D is not None:
            q_THD = self.rms_norm(q_THD, layer.q_norm_D, layer.eps)
        if layer.k_norm_D is not None:
            k_TJD = self.rms_norm(k_TJD, layer.k_norm_D, layer.eps)
        if rotation is not None:
            wide = torch.promote_types(q_THD.dtype, torch.float32) if layer.wide_rotation else q_THD.dtype
            q_THD, k_TJD = (
                self.rotate(x_THD.to(wide), *rotation).to(x_THD.dtype) for x_THD in (q_THD, k_TJD)
            )
        self.append(k_TJD, v_TJD, pages, group)
        o_THW = self.attend(q_THD, pages, group, layer.scale, layer.window, layer.value_dim)
        if gate_THD is not None:
            o_THW = o_THW * torch.sigmoid(gate_THD)
        return o_THW.reshape(tokens, -1)


REFERENCE = ComposedAttention(
    norm_reference.rms_norm, rope_reference.rotate, attention_reference.append, attention_reference.attend
)
CPU = ComposedAttention(norm_cpu.rms_norm, rope_cpu.rotate, attention_cpu.append, attention_cpu.attend)
