"""Multi-head latent attention: keys and values made of one narrow vector, a part of the keys shared by heads.

The cache holds both of each head, not the vector. Its entries have one width, the larger of the two; the
narrower ones end in zeros, which add nothing to a score and are cut off the output. Where positions are
rotary they turn the shared part, with which queries and keys begin.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.group import Group
from specdec.kernels.self_attention.layer import AttentionLayer
from specdec.kernels.table import Kernels
from specdec.models.linear import Linear
from specdec.models.mixers.base import LoadedMixer, Memory, Mixer, Place, Step
from specdec.models.norm import Norm
from specdec.models.rope import Rope
from specdec.models.weights import Weights
from specdec.state_slots.layout import KVShape


@dataclass(frozen=True, slots=True)
class LatentAttention(Mixer):
    heads: int
    own_dim: int
    """Entries of a key that are its head's own."""
    shared_dim: int
    """Entries of a key that all heads share."""
    value_dim: int
    kv_rank: int
    """Width of what keys and values are made of."""
    q_rank: int | None
    """Width of what queries are made of; None: of the stream."""
    norm: Norm
    """Of both."""
    rope: Rope | None = None
    """Of the shared entries of keys, and of the queries' that meet them."""
    gated: bool = False
    """What a head gives is multiplied by the sigmoid of a number of its own."""

    kind: ClassVar[str] = "latent attention"

    @property
    def key_dim(self) -> int:
        return self.own_dim + self.shared_dim

    @property
    def width(self) -> int:
        """Entries of a head in the cache."""
        return max(self.key_dim, self.value_dim)

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows of the first projection: queries or what makes them, what makes keys and values, gates."""
        queries = {"q": self.heads * self.key_dim} if self.q_rank is None else {"q_a": self.q_rank}
        gates = {"gate": self.heads} if self.gated else {}
        return {**queries, "kv_a": self.kv_rank + self.shared_dim, **gates}

    def kv_shape(self) -> KVShape:
        return KVShape(self.heads, self.width)

    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,) if self.rope else ()

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        queries = {"attention queries": (self.heads * self.key_dim, self.q_rank)} if self.q_rank else {}
        return {
            "attention in": (sum(self.rows.values()), hidden),
            **queries,
            "attention expand": (self.heads * (self.own_dim + self.value_dim), self.kv_rank),
            "attention out": (hidden, self.heads * self.value_dim),
        }

    def pair_flops(self) -> float:
        """Count scores and sums over the cache's entries, zeros included."""
        return 4.0 * self.heads * self.width

    def build(self, weights: Weights, kernels: Kernels, place: Place) -> "LoadedLatentAttention":
        return LoadedLatentAttention(self, weights, kernels, place)


class LoadedLatentAttention(LoadedMixer):
    def __init__(self, s: LatentAttention, weights: Weights, kernels: Kernels, place: Place) -> None:
        self.kernels, self.index, self.spec = kernels, place.kv, s
        self.project = Linear.load(weights, kernels, s.rows, place.reads)
        queries, _, *gates = s.rows.values()
        self.columns = [queries, s.kv_rank, s.shared_dim, sum(gates)]
        self.query: Linear | None = None
        if s.q_rank is not None:
            self.q_norm_R = s.norm.load(weights, "q_norm.weight", s.q_rank)
            self.query = Linear.load(weights, kernels, {"q_b": s.heads * s.key_dim}, s.q_rank)
        self.kv_norm_R = s.norm.load(weights, "kv_norm.weight", s.kv_rank)
        self.expand = Linear.load(weights, kernels, {"kv_b": s.heads * (s.own_dim + s.value_dim)}, s.kv_rank)
        self.layer = AttentionLayer(
            *(s.heads, s.heads, s.width, s.key_dim**-0.5),
            gated=False,
            q_norm_D=None,
            k_norm_D=None,
            eps=0.0,
        )
        self.out = Linear.load(weights, kernels, {"o": place.writes}, s.heads * s.value_dim)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        s, ops, pages = self.spec, self.kernels, step.memory.pages(self.index)
        projected_TN, gate_TH = self._project(x_TD)
        rotation = step.rope[s.rope] if s.rope else None

        def attend(group: Group) -> Tensor:
            own = (group.take(rotation[0]), group.take(rotation[1])) if rotation else None
            return ops.self_attention(group.take(projected_TN), self.layer, own, pages, group)

        o_THW = step.by_group(attend).view(-1, s.heads, s.width)[..., : s.value_dim]
        if s.gated:
            o_THW = ops.gate_heads(o_THW, gate_TH)
        return self.out(o_THW.flatten(1).contiguous())

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Make queries, keys and values of every head, each as wide as the cache's entries, and the gates."""
        s, ops = self.spec, self.kernels
        q_TN, kv_TR, shared_TE, gate_TH = torch.split(self.project(x_TD), self.columns, dim=1)
        if self.query is not None:
            q_TN = self.query(ops.rms_norm(q_TN, self.q_norm_R, s.norm.eps))
        own_THK, turned_THE = torch.split(q_TN.view(len(x_TD), s.heads, -1), [s.own_dim, s.shared_dim], dim=2)
        q_THK = torch.cat((turned_THE, own_THK), dim=2)
        kv_THN = self.expand(ops.rms_norm(kv_TR, self.kv_norm_R, s.norm.eps)).view(len(x_TD), s.heads, -1)
        own_THK, v_THW = torch.split(kv_THN, [s.own_dim, s.value_dim], dim=2)
        k_THK = torch.cat((shared_TE[:, None].expand(-1, s.heads, -1), own_THK), dim=2)
        padded = [F.pad(part, (0, s.width - part.shape[2])).flatten(1) for part in (q_THK, k_THK, v_THW)]
        return torch.cat(padded, dim=1), gate_TH

    def move(self, memory: Memory, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
        self.kernels.move(memory.pages(self.index), table_BN, from_BP, to_BP)
