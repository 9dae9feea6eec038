"""A transformer block whose weights several layers share; it reads the stream and the embeddings.

With e the embeddings: a = attention(rms([x, e])), the output is linear(ffn(rms(a))), without inner residuals.
The first layer that uses a block loads it and lends it to the others. Each has its own last projection, KV,
and low-rank adapters (B A y added to W y).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specdec.kernels.table import Kernels
from specdec.models.feed_forward import MLP
from specdec.models.linear import Linear, Projection
from specdec.models.mixers.attention import Attention
from specdec.models.mixers.base import ArenaViews, LoadedMixer, Mixer, MixerPlacement, Step
from specdec.models.norm import Norm
from specdec.models.rope import Rope
from specdec.models.weights import Weights
from specdec.state_slots.layout import KVShape

SHARED = "shared"
"""Prefix of shared weights, within the lending layer's names."""


@dataclass(frozen=True, slots=True)
class SharedBlock(Mixer):
    attention: Attention
    ffn: MLP
    norm: Norm
    rank: int = 0
    """Rank of the adapters of the feed-forward's first product; 0: no adapters."""
    adapts_attention: bool = False
    """Queries, keys and values have adapters too."""

    kind: ClassVar[str] = "shared attention block"

    def kv_shape(self) -> KVShape:
        return self.attention.kv_shape()

    def ropes(self) -> tuple[Rope, ...]:
        return self.attention.ropes()

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        shapes = {**self.attention.matrices(hidden), **self.ffn.matrices(hidden)}
        shapes["attention in"] = shapes["attention in"][0], 2 * hidden
        for name, (outputs, inputs) in self.adapted(hidden).items():
            shapes |= {f"{name} adapter in": (self.rank, inputs), f"{name} adapter out": (outputs, self.rank)}
        return shapes | {"shared linear": (hidden, hidden)}

    def adapted(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        """Return the products with adapters, with their sizes [out, in]."""
        base = self.attention
        widths = {"q": base.heads, "k": base.kv_heads, "v": base.kv_heads} if self.adapts_attention else {}
        shapes = {name: (heads * base.head_dim, 2 * hidden) for name, heads in widths.items()}
        return shapes | ({"up": (self.ffn.up_rows, hidden)} if self.rank else {})

    def pair_flops(self) -> float:
        return self.attention.pair_flops()

    def build(self, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> "LoadedSharedBlock":
        return LoadedSharedBlock(self, weights, kernels, placement)


class SharedWeights:
    """The weights that all uses of a block share."""

    def __init__(self, s: SharedBlock, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> None:
        hidden = placement.writes
        self.norm_D = s.norm.load(weights, "norm.weight", 2 * hidden)
        reads_both = MixerPlacement(2 * hidden, hidden, kv=placement.kv)
        self.attention = s.attention.build(weights.within("attention"), kernels, reads_both)
        self.ffn_norm_D = s.norm.load(weights, "ffn_norm.weight", hidden)
        self.ffn = s.ffn.build(hidden, weights.within("ffn"), kernels)


class LoadedSharedBlock(LoadedMixer):
    def __init__(self, s: SharedBlock, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> None:
        self.kernels, self.eps, hidden = kernels, s.norm.eps, placement.writes
        lender = placement.lender
        assert lender is None or isinstance(lender, LoadedSharedBlock)
        self.lent: SharedWeights = (
            lender.lent if lender else SharedWeights(s, weights.within(SHARED), kernels, placement)
        )
        adapters = dict(_adapters(s, weights, kernels, hidden))
        attention, ffn, up = self.lent.attention, self.lent.ffn, adapters.pop("up", None)
        project = (
            AdaptedLinear(kernels, attention.project, *adapters.values()) if adapters else attention.project
        )
        self.attention = attention.used_at(placement.kv, project)
        self.ffn = ffn.with_up(AdaptedLinear(kernels, ffn.up, up)) if up else ffn
        self.linear = Linear.load(weights, kernels, {"linear": hidden}, hidden)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        ops, lent = self.kernels, self.lent
        assert step.embed_TD is not None, "the network keeps the embeddings for a side input"
        both_TN = ops.rms_norm(ops.concat(x_TD, step.embed_TD), lent.norm_D, self.eps)
        mixed_TD = ops.rms_norm(self.attention(both_TN, step), lent.ffn_norm_D, self.eps)
        return self.linear(self.ffn(mixed_TD))

    def move(self, memory: ArenaViews, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
        self.attention.move(memory, table_BN, from_BP, to_BP)


class LowRankAdapter:
    """A low-rank adapter: B A y."""

    def __init__(self, inner: Linear, outer: Linear) -> None:
        self.inner, self.outer = inner, outer

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.outer(self.inner(x_TD))


class AdaptedLinear:
    """A shared product plus its adapters' outputs, concatenated in order."""

    def __init__(self, kernels: Kernels, shared: Projection, *adapters: LowRankAdapter) -> None:
        self.kernels, self.shared, self.adapters = kernels, shared, adapters

    def __call__(self, x_TD: Tensor) -> Tensor:
        updates = [adapter(x_TD) for adapter in self.adapters]
        own_TN = updates[0] if len(updates) == 1 else self.kernels.concat(*updates)
        return self.kernels.add(self.shared(x_TD), own_TN)


def _adapters(
    s: SharedBlock, weights: Weights, kernels: Kernels, hidden: int
) -> Iterator[tuple[str, LowRankAdapter]]:
    for name, (outputs, inputs) in s.adapted(hidden).items():
        adapter_weights = weights.within(f"{name}_adapter")
        inner = Linear.load(adapter_weights, kernels, {"in": s.rank}, inputs)
        yield name, LowRankAdapter(inner, Linear.load(adapter_weights, kernels, {"out": outputs}, s.rank))
