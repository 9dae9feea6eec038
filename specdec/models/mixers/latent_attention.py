"""Multi-head latent attention: keys and values come from one narrow vector; heads share a part of the keys.

The cache holds only that vector c and the shared part r of each token, as one key [r | c] that all heads
share and whose last entries are its value. A head has its own matrices: q = [n | s], k = [U c | r], v = V c,

    q · k = (Uᵀ n) · c + s · r        Σ_j w_j v_j = V Σ_j w_j c_j

so queries are multiplied by Uᵀ before attention, and its output by V. Rotary positions rotate the shared
part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from specdec.kernels.group import Group
from specdec.kernels.self_attention.layer import AttentionLayer
from specdec.kernels.table import Kernels
from specdec.models.cut import Cut, columns, divided, rows
from specdec.models.linear import Linear, LinearByHead
from specdec.models.mixers.base import ArenaViews, LoadedMixer, Mixer, MixerPlacement, Step
from specdec.models.norm import Norm
from specdec.models.rope import Rope
from specdec.models.weights import Weights
from specdec.state_slots.layout import KVShape


@dataclass(frozen=True, slots=True)
class LatentAttention(Mixer):
    heads: int
    own_dim: int
    """Entries of a key that are specific to the head."""
    shared_dim: int
    """Entries of a key that all heads share."""
    value_dim: int
    kv_rank: int
    """Width of the latent vector of keys and values."""
    q_rank: int | None
    """Width of the latent vector of queries; None: the hidden size."""
    norm: Norm
    """Norm of both latent vectors."""
    rope: Rope | None = None
    """Applied to the shared entries of keys and their counterparts in queries."""
    gated: bool = False
    """Multiply each head's output by the sigmoid of its gate."""

    kind: ClassVar[str] = "latent attention"

    @property
    def query_dim(self) -> int:
        return self.own_dim + self.shared_dim

    @property
    def cached_dim(self) -> int:
        """Cached entries per token."""
        return self.shared_dim + self.kv_rank

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows of the first projection: queries or their latent, the keys' and values' latent, gates."""
        queries = {"q": self.heads * self.query_dim} if self.q_rank is None else {"q_a": self.q_rank}
        gates = {"gate": self.heads} if self.gated else {}
        return {**queries, "kv_a": self.kv_rank + self.shared_dim, **gates}

    def kv_shape(self) -> KVShape:
        return KVShape(1, self.cached_dim, parts=1)

    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,) if self.rope else ()

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        queries = {"attention queries": (self.heads * self.query_dim, self.q_rank)} if self.q_rank else {}
        return {
            "attention in": (sum(self.rows.values()), hidden),
            **queries,
            "attention by head": (self.heads * (self.own_dim + self.value_dim), self.kv_rank),
            "attention out": (hidden, self.heads * self.value_dim),
        }

    def pair_flops(self) -> float:
        return 2.0 * self.heads * (self.cached_dim + self.kv_rank)

    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Divide the heads; every rank has both latent vectors and the whole cache."""
        queries, heads = rows(self.heads * self.query_dim), rows(self.heads)
        return replace(self, heads=divided(self.heads, ranks, "attention heads")), {
            **dict.fromkeys(("q.weight", "q_b.weight"), queries),
            **dict.fromkeys(("kv_b.weight", "gate.weight"), heads),
            "o.weight": columns(self.heads * self.value_dim),
        }

    def build(self, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> "LoadedLatentAttention":
        return LoadedLatentAttention(self, weights, kernels, placement)


class LoadedLatentAttention(LoadedMixer):
    def __init__(
        self, s: LatentAttention, weights: Weights, kernels: Kernels, placement: MixerPlacement
    ) -> None:
        self.kernels, self.index, self.spec = kernels, placement.kv, s
        self.project = Linear.load(weights, kernels, s.rows, placement.reads)
        queries, _, *gates = s.rows.values()
        self.columns = [queries, s.kv_rank, s.shared_dim, sum(gates)]
        self.query: Linear | None = None
        if s.q_rank is not None:
            self.q_norm_R = s.norm.load(weights, "q_norm.weight", s.q_rank)
            self.query = Linear.load(weights, kernels, {"q_b": s.heads * s.query_dim}, s.q_rank)
        self.kv_norm_R = s.norm.load(weights, "kv_norm.weight", s.kv_rank)
        # Not quantised: one half is multiplied along its outputs, but formats have scales along inputs.
        kv_b_HNR = weights.take("kv_b.weight", (s.heads, s.own_dim + s.value_dim, s.kv_rank))
        self.absorb = LinearByHead(kernels, kv_b_HNR[:, : s.own_dim].transpose(1, 2))
        self.expand = LinearByHead(kernels, kv_b_HNR[:, s.own_dim :])
        self.layer = AttentionLayer(
            *(s.heads, 1, s.cached_dim, s.query_dim**-0.5),
            gated=False,
            q_norm_D=None,
            k_norm_D=None,
            eps=0.0,
            value_dim=s.kv_rank,
        )
        self.out = Linear.load(weights, kernels, {"o": placement.writes}, s.heads * s.value_dim)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        s, ops, pages = self.spec, self.kernels, step.memory.pages(self.index)
        projected_TN, gate_TH = self._project(x_TD)
        rotation = step.rope[s.rope] if s.rope else None

        def attend(group: Group) -> Tensor:
            row_rotation = (group.take(rotation[0]), group.take(rotation[1])) if rotation else None
            return ops.self_attention(group.take(projected_TN), self.layer, row_rotation, pages, group)

        o_THR = step.by_group(attend).view(-1, s.heads, s.kv_rank)
        o_THW = self.expand(o_THR)
        if s.gated:
            o_THW = ops.gate_heads(o_THW, gate_TH)
        return self.out(o_THW.flatten(1))

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries for the cached keys with the new keys, both shared part first; and gates."""
        s, ops = self.spec, self.kernels
        q_TN, latent_TR, shared_TE, gate_TH = torch.split(self.project(x_TD), self.columns, dim=1)
        if self.query is not None:
            q_TN = self.query(ops.rms_norm(q_TN, self.q_norm_R, s.norm.eps))
        q_THN = q_TN.view(len(x_TD), s.heads, -1)
        own_THN, shared_THE = torch.split(q_THN, [s.own_dim, s.shared_dim], dim=2)
        q_THD = torch.cat((shared_THE, self.absorb(own_THN)), dim=2)
        latent_TR = ops.rms_norm(latent_TR, self.kv_norm_R, s.norm.eps)
        return torch.cat((q_THD.flatten(1), shared_TE, latent_TR), dim=1), gate_TH

    def move(self, memory: ArenaViews, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
        self.kernels.move(memory.pages(self.index), table_BN, from_BP, to_BP)
