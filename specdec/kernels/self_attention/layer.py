"""One layer's parameters, and the operations that make it up, whichever implementation they come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.group import Group

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [T, R] of a group's positions."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    gated: bool
    """The projection holds [query | gate] per head; the output is multiplied by the gate's sigmoid."""
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float

    @property
    def widths(self) -> list[int]:
        """Columns of the queries (with their gates), keys and values, in the order of the projection."""
        kv = self.kv_heads * self.head_dim
        return [self.heads * self.head_dim * (2 if self.gated else 1), kv, kv]


class Operations(NamedTuple):
    rms_norm: Callable[..., Tensor]
    rotate: Callable[..., Tensor]
    append: Callable[..., None]
    attend: Callable[..., Tensor]


def run(
    ops: Operations,
    projected_TN: Tensor,
    layer: AttentionLayer,
    rotation: Rotation | None,
    pages: Tensor,
    group: Group,
) -> Tensor:
    """Return the layer's output before its last projection; the window's keys and values enter the pages."""
    tokens = projected_TN.shape[0]
    q_TN, k_TN, v_TN = torch.split(projected_TN, layer.widths, dim=-1)
    q_THD, gate_THD = q_TN.view(tokens, layer.heads, -1), None
    if layer.gated:
        q_THD, gate_THD = q_THD.chunk(2, dim=-1)
    k_TJD = k_TN.view(tokens, layer.kv_heads, layer.head_dim)
    v_TJD = v_TN.view(tokens, layer.kv_heads, layer.head_dim)
    if layer.q_norm_D is not None:
        q_THD = ops.rms_norm(q_THD, layer.q_norm_D, layer.eps)
    if layer.k_norm_D is not None:
        k_TJD = ops.rms_norm(k_TJD, layer.k_norm_D, layer.eps)
    if rotation is not None:
        q_THD, k_TJD = ops.rotate(q_THD, *rotation), ops.rotate(k_TJD, *rotation)
    ops.append(k_TJD, v_TJD, pages, group)
    o_THD = ops.attend(q_THD, pages, group, layer.scale)
    if gate_THD is not None:
        o_THD = o_THD * torch.sigmoid(gate_THD)
    return o_THD.reshape(tokens, -1)
