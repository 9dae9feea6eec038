"""Tensor parallelism: a rank's share of a network, and of the weights as they are read."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.linear.matrix import Matrix
from specdec.models import spec
from specdec.models.cut import Cut, rows, share
from specdec.models.layouts import Shape
from specdec.models.linear import Projection
from specdec.models.weights import Scoped, Weights


class Shard:
    """A rank's place in its group. This class does not communicate; its results are this rank's parts."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def part(self, count: int) -> range:
        """Return this rank's ids of `count`, such as rows of the vocabulary; they need not divide."""
        return share(count, self.rank, self.ranks)

    def sum(self, partial_TD: Tensor) -> Tensor:
        """Sum a tensor over all ranks; may overwrite it. Every rank gets the same bits."""
        return partial_TD

    def joined(self, head: Projection, vocab: int) -> Projection:
        """Return a product with all rows of the vocabulary, given this rank's."""
        return head


def shard_network(network: spec.NetworkSpec, ranks: int) -> tuple[spec.NetworkSpec, dict[str, Cut]]:
    """Return the share of each of several ranks, and the cut of each tensor by our name.

    The multi-token head stays whole: rank 0 drafts alone. Raise for layers that cannot be divided.
    """
    cuts: dict[str, Cut] = {} if network.tied else {"head.weight": rows(network.vocab)}
    layers = []
    for i, layer in enumerate(network.layers):
        if layer.shares is not None or layer.frame.side or layer.reads is not None:
            raise ConfigError("tp: layers that share weights run on one rank only; use tp=1.", field="tp")
        mixers = []
        for k, mixer in enumerate(layer.mixers):
            local, own = mixer.cut(ranks)
            mixers.append(local)
            cuts |= {f"layers.{i}.mixer{k + 1 if k else ''}.{name}": cut for name, cut in own.items()}
        ffn = layer.ffn
        if ffn:
            ffn, own = ffn.cut(ranks)
            cuts |= {f"layers.{i}.ffn.{name}": cut for name, cut in own.items()}
        layers.append(replace(layer, mixers=tuple(mixers), ffn=ffn))
    return replace(network, layers=tuple(layers)), cuts


class ShardedWeights:
    """Keeps a rank's part of each tensor, right after it is read: one is whole in memory at a time."""

    def __init__(self, weights: Weights, cuts: Mapping[str, Cut], shard: Shard) -> None:
        self._weights, self._cuts, self._shard = weights, cuts, shard

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor, and keep this rank's part."""
        cut = self._cuts.get(name)
        if cut is None:
            return self._weights.take(name, shape, dtype)
        whole = self._weights.take(name, cut.whole(shape), dtype)
        return cut.part(whole, self._shard.rank, self._shard.ranks)

    def matrix(self, name: str, shape: Shape) -> Matrix:
        """Read a matrix, which must not be quantised, and keep this rank's part."""
        cut = self._cuts.get(name)
        if cut is None:
            return self._weights.matrix(name, shape)
        whole = self._weights.matrix(name, cut.whole(shape))
        assert isinstance(whole, Tensor)
        return cut.part(whole, self._shard.rank, self._shard.ranks)

    def output(self, name: str, weight_ND: Tensor) -> Matrix:
        """Return the output matrix, or this rank's rows of it."""
        return self._weights.output(name, weight_ND)

    def has(self, name: str) -> bool:
        """Return whether the tensor is present."""
        return self._weights.has(name)

    def within(self, prefix: str) -> Weights:
        """Return a view of the tensors below a prefix."""
        return Scoped(self, prefix)
