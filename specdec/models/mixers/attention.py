"""Softmax attention over the KV cache or a sliding window, with RoPE, query and key norms, and gates."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.group import Group
from specdec.kernels.self_attention.layer import AttentionLayer
from specdec.kernels.table import Kernels
from specdec.models.cut import ADDED_ONCE, Cut, columns, divided, rows
from specdec.models.linear import Linear, Projection
from specdec.models.mixers.base import ArenaViews, LoadedMixer, Mixer, MixerPlacement, Step
from specdec.models.norm import Norm
from specdec.models.rope import Rope
from specdec.models.weights import Weights
from specdec.state_slots.layout import KVShape


@dataclass(frozen=True, slots=True)
class Attention(Mixer):
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    qk_norm: Norm | None
    gated: bool
    """The query projection holds [query | gate] per head; the output is multiplied by sigmoid(gate)."""
    bias: bool = False
    out_bias: bool = True
    """With `bias`: the output projection has one too."""
    norm_whole: bool = False
    """Normalise all query heads together, and all key heads."""
    window: int | None = None
    """Sliding window in tokens, including the token itself. None: all."""
    head_gate: bool = False
    """A separate projection gives one gate per head; its output is multiplied by the gate's sigmoid."""

    kind: ClassVar[str] = "attention"

    def kv_shape(self) -> KVShape:
        return KVShape(self.kv_heads, self.head_dim)

    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,) if self.rope else ()

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        query_width = self.heads * self.head_dim
        rows = query_width * (2 if self.gated else 1) + 2 * self.kv_heads * self.head_dim
        gate = {"attention gate": (self.heads, hidden)} if self.head_gate else {}
        return {"attention in": (rows, hidden), **gate, "attention out": (hidden, query_width)}

    def pair_flops(self) -> float:
        return 4.0 * self.heads * self.head_dim

    def reach(self) -> int | None:
        return self.window

    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Divide the heads; with fewer KV heads than ranks, several ranks keep the same one."""
        if self.norm_whole:
            raise ConfigError(
                "tp: attention that normalises all heads together runs on one rank only; use tp=1.",
                field="tp",
            )
        heads = divided(self.heads, ranks, "attention heads")
        copies = 1 if ranks % self.kv_heads else ranks // self.kv_heads
        kv_heads = divided(self.kv_heads, ranks // copies, "KV heads")
        wide, kv = self.heads * self.head_dim, Cut(0, (self.kv_heads * self.head_dim,), copies)
        cuts = {"q": rows(wide * (2 if self.gated else 1)), "k": kv, "v": kv, "gate": rows(self.heads)}
        named = {f"{name}.{leaf}": own for name, own in cuts.items() for leaf in ("weight", "bias")}
        local = replace(self, heads=heads, kv_heads=kv_heads)
        return local, {**named, "o.weight": columns(wide), "o.bias": ADDED_ONCE}

    def build(self, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> "LoadedAttention":
        return LoadedAttention(self, weights, kernels, placement)


class LoadedAttention(LoadedMixer):
    def __init__(self, s: Attention, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> None:
        self.kernels, self.index, self.rope = kernels, placement.kv, s.rope
        assert not (s.gated and s.norm_whole), "the gate lies between the query heads"
        norm, self.whole = s.qk_norm, s.norm_whole
        heads = (s.heads, s.kv_heads) if s.norm_whole else (1, 1)
        self.q_norm_D, self.k_norm_D = (
            norm.load(weights, f"{name}_norm.weight", count * s.head_dim) if norm else None
            for name, count in zip("qk", heads, strict=True)
        )
        self.layer = AttentionLayer(
            *(s.heads, s.kv_heads, s.head_dim, s.scale, s.gated),
            q_norm_D=None if s.norm_whole else self.q_norm_D,
            k_norm_D=None if s.norm_whole else self.k_norm_D,
            eps=norm.eps if norm else 0.0,
            wide_rotation=s.rope is not None and s.rope.wide,
            window=s.window,
        )
        rows = dict(zip("qkv", self.layer.widths, strict=True))
        self.project: Projection = Linear.load(weights, kernels, rows, placement.reads, bias=s.bias)
        self.gate = Linear.load(weights, kernels, {"gate": s.heads}, placement.reads) if s.head_gate else None
        inner, bias = s.heads * s.head_dim, s.bias and s.out_bias
        self.out = Linear.load(weights, kernels, {"o": placement.writes}, inner, bias=bias)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        ops, pages = self.kernels, step.memory.pages(self.index)
        projected_TN = self._normalise(self.project(x_TD))
        rotation = step.rope[self.rope] if self.rope else None

        def attend(group: Group) -> Tensor:
            row_rotation = (group.take(rotation[0]), group.take(rotation[1])) if rotation else None
            return ops.self_attention(group.take(projected_TN), self.layer, row_rotation, pages, group)

        out_TN = step.by_group(attend)
        if self.gate is not None:
            out_THD = out_TN.view(len(x_TD), self.layer.heads, -1)
            out_TN = ops.gate_heads(out_THD, self.gate(x_TD)).flatten(1)
        return self.out(out_TN)

    def write(self, kv_TN: Tensor, step: Step) -> None:
        """Append keys and values to this layer's memory, given their products, without queries.

        There is no kernel for this alone: each token attends to itself, and the output is dropped.
        """
        ops, layer, pages = self.kernels, self.layer, step.memory.pages(self.index)
        keys_only = replace(layer, heads=layer.kv_heads, q_norm_D=layer.k_norm_D, window=1)
        projected_TN = ops.concat(kv_TN[:, : layer.widths[1]], kv_TN)
        rotation = step.rope[self.rope] if self.rope else None

        def append(group: Group) -> Tensor:
            row_rotation = (group.take(rotation[0]), group.take(rotation[1])) if rotation else None
            return ops.self_attention(group.take(projected_TN), keys_only, row_rotation, pages, group)

        step.by_group(append)

    def used_at(self, kv: int, project: Projection) -> "LoadedAttention":
        """Return attention with the same weights except the first product's, and its own KV."""
        clone = copy(self)
        clone.index, clone.project = kv, project
        return clone

    def _normalise(self, projected_TN: Tensor) -> Tensor:
        """Normalise all heads together if configured; the kernel normalises single heads."""
        if not self.whole or self.q_norm_D is None or self.k_norm_D is None:
            return projected_TN
        ops, eps = self.kernels, self.layer.eps
        q_TN, k_TN, v_TN = torch.split(projected_TN, list(self.layer.widths), dim=1)
        return ops.concat(
            ops.rms_norm(q_TN, self.q_norm_D, eps), ops.rms_norm(k_TN, self.k_norm_D, eps), v_TN
        )

    def move(self, memory: ArenaViews, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
        self.kernels.move(memory.pages(self.index), table_BN, from_BP, to_BP)
