"""Shares of a network on several ranks compute what the whole network does. Threads stand for ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.table import load_kernels
from specdec.models import families, spec
from specdec.models.cut import Cut, share
from specdec.models.linear import Projection
from specdec.models.mixers import Attention
from specdec.models.network import Network, memory_layout
from specdec.models.shards import Shard, ShardedWeights, shard_network
from specdec.models.weights import RandomWeights
from specdec.state_slots.arena import Arena
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from tests.models.agreeing import CONFIGS
from tests.tolerances import KERNEL_FLOAT64

CPU = torch.device("cpu")
VOCAB = 61
"""A prime, so that no number of ranks divides it."""
REFUSED = {"mamba", "jamba", "minimax", "zamba", "zamba2", "olmo_hybrid"}
"""Families with a mixer that runs on one rank only."""


class Meeting:
    """Where the threads of a group exchange tensors."""

    def __init__(self, ranks: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * ranks
        self.barrier = Barrier(ranks, timeout=60)

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class ThreadShard(Shard):
    """A rank that is a thread; leaves out the sum of this number, as a mutant."""

    def __init__(self, rank: int, ranks: int, meeting: Meeting, *, without: int | None) -> None:
        super().__init__(rank, ranks)
        self.meeting, self.without, self.sums = meeting, without, 0

    def sum(self, partial_TD: Tensor) -> Tensor:
        self.sums += 1
        parts = self.meeting.exchange(self.rank, partial_TD)
        return partial_TD if self.sums == self.without else torch.stack(parts).sum(0)

    def joined(self, head: Projection, vocab: int) -> Projection:
        return lambda hidden_TD: torch.cat(self.meeting.exchange(self.rank, head(hidden_TD)), 1)


class Biased(RandomWeights):
    """Random weights whose biases and norms are not constant."""

    def _draw(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if len(shape) == 1 and name.rsplit(".", 1)[-1] in ("bias", "weight", "D"):
            return 0.5 + self._normal(name, shape, 0.2, dtype)
        return super()._draw(name, shape, dtype)


@torch.inference_mode()
def logits(network: spec.NetworkSpec, build: Callable[[], Network]) -> Tensor:
    """Prefill a prompt in two chunks, verify a tree, fold a path of it, and decode a token."""
    layout = memory_layout(network, torch.float64, state_dtype=torch.float64)
    arena = Arena(layout, 12 * layout.slab_bytes + (1 << 20), CPU)
    arena.data.fill_(0xFF)
    model, width = build(), layout.conv_width
    table_N = torch.tensor(arena.take_blocks(1, 4) if layout.kv else [], dtype=torch.int64)
    state = (arena.take_state(1) or 0) if layout.states else 0
    records = (arena.take_records(1, 6) if layout.states else None) or []
    found = []

    def run(row: Row) -> None:
        found.append(model.logits(model.forward(build_window([row], width, CPU), arena)))

    prompt = [(7 * i * i + 3) % VOCAB for i in range(20)]
    run(Row(TokenTree.chain(prompt[:13]), 0, table_N, state))
    run(Row(TokenTree.chain(prompt[13:]), 13, table_N, state))
    tree = TokenTree((4, 9, 12, 40, 51, 3), (-1, 0, 0, 1, 2, 2))
    run(Row(tree, 20, table_N, state, records=records or None))
    path = [records[node] for node in tree.path(3)] if records else []
    run(Row(TokenTree.chain([5]), 23, table_N, state, path=path))
    return torch.cat(found)


def described(family: str) -> spec.NetworkSpec:
    network = families.network(CONFIGS[family]().to_dict())
    return replace(network, vocab=VOCAB, mtp=(), eos=())


def sharded(
    network: spec.NetworkSpec, ranks: int, *, without: int | None = None, swapped: bool = False
) -> list[Tensor]:
    """Return each rank's logits; with `swapped` rank 0 reads a tensor's part of another rank."""
    meeting = Meeting(ranks)

    def run(rank: int) -> Tensor:
        shard = ThreadShard(rank, ranks, meeting, without=without)
        local, cuts = shard_network(network, ranks)
        if swapped and rank == 0:
            name = next(name for name in cuts if name.endswith((".q.weight", ".in_z.weight", ".in.weight")))
            cuts[name] = Swapped(*(getattr(cuts[name], field) for field in ("dim", "runs", "copies")))

        def build() -> Network:
            weights = ShardedWeights(Biased(3, torch.float64), cuts, shard)
            return Network(local, weights, load_kernels("cpu"), max_length=64, device=CPU, shard=shard)

        return logits(local, build)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


class Swapped(Cut):
    """Gives a rank the part of another, as a mutant."""

    def part(self, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        return super().part(tensor, ranks - 1, ranks)


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def whole(network: spec.NetworkSpec) -> Tensor:
    def build() -> Network:
        return Network(network, Biased(3, torch.float64), load_kernels("cpu"), max_length=64, device=CPU)

    return logits(network, build)


@pytest.mark.parametrize("family", [name for name in families.TITLES if name not in REFUSED])
def test_ranks_compute_the_logits_of_the_whole_network(family: str) -> None:
    network = described(family)
    expected = whole(network)
    assert expected.isfinite().all()
    for own in sharded(network, 2):
        assert difference(own, expected) < KERNEL_FLOAT64


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 4), (2, 4), (1, 2)])
def test_ranks_share_kv_heads(kv_heads: int, ranks: int) -> None:
    network = described("qwen2")
    attention = network.layers[0].mixers[0]
    assert isinstance(attention, Attention)
    own = replace(attention, kv_heads=kv_heads)
    layers = tuple(replace(layer, mixers=(own,)) for layer in network.layers)
    network = replace(network, layers=layers)
    for found in sharded(network, ranks):
        assert difference(found, whole(network)) < KERNEL_FLOAT64


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "llama"])
def test_a_missing_sum_and_a_swapped_part_are_noticed(family: str) -> None:
    network = described(family)
    expected = whole(network)
    for mutant in (sharded(network, 2, without=2), sharded(network, 2, swapped=True)):
        assert max(difference(own, expected) for own in mutant) > 1e3 * KERNEL_FLOAT64


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_that_cannot_be_shared_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="one rank only; use tp=1"):
        shard_network(described(family), 2)


@pytest.mark.parametrize(("family", "noun"), [("llama", "4 attention heads"), ("qwen3_5", "2 key heads")])
def test_a_number_of_ranks_that_does_not_divide_is_refused_with_the_remedy(family: str, noun: str) -> None:
    with pytest.raises(ConfigError, match=f"3 ranks cannot share {noun} evenly; lower tp to a divisor of"):
        shard_network(described(family), 3)


def test_parts_of_a_count_that_does_not_divide_cover_it() -> None:
    assert [len(share(VOCAB, rank, 4)) for rank in range(4)] == [15, 15, 15, 16]
    assert [id for rank in range(4) for id in share(VOCAB, rank, 4)] == list(range(VOCAB))
