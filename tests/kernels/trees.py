"""Random trees, and a recurrent layer's memory as in an arena: strided, NaN where unwritten."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory

Parents = tuple[int, ...]
SLABS, PLACES = 32, 80


@dataclass(frozen=True)
class Layer:
    """The sizes of a recurrent layer: `groups` key heads serve `heads` heads."""

    groups: int = 2
    heads: int = 4
    key: int = 6
    value: int = 5
    taps: int = 4
    channels: int = 9
    dtype: torch.dtype = torch.float64
    by_key: bool = False
    """Whether a decay is a vector over the keys."""

    @property
    def decays(self) -> tuple[int, ...]:
        """Return the shape of a token's decays."""
        return (self.heads, self.key) if self.by_key else (self.heads,)


def chain(width: int) -> Parents:
    return tuple(range(-1, width - 1))


def star(width: int) -> Parents:
    return (-1, *[0] * (width - 1))


def random_tree(width: int, seed: int) -> Parents:
    generator = torch.Generator().manual_seed(seed)
    return (-1, *[int(torch.randint(max(0, i - 6), i, (), generator=generator)) for i in range(1, width)])


def draw(kind: str, width: int, seed: int) -> Parents:
    if kind == "random":
        return random_tree(width, seed)
    return chain(width) if kind == "chain" else star(width)


def path_to(parents: Parents, node: int) -> list[int]:
    """Return the nodes from the root to `node`."""
    return [*(path_to(parents, parents[node]) if parents[node] >= 0 else []), node]


def ancestors(parents: Parents) -> list[list[bool]]:
    return [[j in path_to(parents, i) for j in range(len(parents))] for i in range(len(parents))]


def taps(parents: Parents, count: int) -> list[list[int]]:
    """Return the input indices of each node's convolution, counting those before the window first."""
    before = list(range(count - 1))
    return [(before + [count - 1 + j for j in path_to(parents, i)])[-count:] for i in range(len(parents))]


def record_ids(places: Sequence[Sequence[tuple[int, int]]]) -> RecordIds:
    """Build record ids from (slab, index) pairs, padding each row with unwritten records."""
    longest = max(map(len, places))
    ids = torch.tensor([[*row, *[(SLABS - 1, PLACES - 1)] * (longest - len(row))] for row in places])
    ids = ids.long().view(len(places), longest, 2)
    return RecordIds(ids[..., 0].contiguous(), ids[..., 1].contiguous())


def scattered(rows: int, width: int, seed: int) -> list[list[tuple[int, int]]]:
    """Give each row its own records, out of order and in several slabs."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm((SLABS - 1) * PLACES, generator=generator)[: rows * width].tolist()
    places = [divmod(at, PLACES) for at in free]
    return [places[b * width : (b + 1) * width] for b in range(rows)]


def in_order(rows: int, width: int, first: int = 3) -> list[list[tuple[int, int]]]:
    """Give each row consecutive records in its own slab."""
    return [[(b + 1, first + i) for i in range(width)] for b in range(rows)]


def snapshot_slots(rows: int, width: int, taken: Sequence[int]) -> list[list[int]]:
    """Give each node of each row its own state slot, out of order."""
    free = [slot for slot in range(1, SLABS) if slot not in taken]
    free = free[::2] + free[1::2]
    return [free[b * width : (b + 1) * width] for b in range(rows)]


def build_group(
    trees: Sequence[Parents],
    slots: Sequence[int],
    *,
    paths: Sequence[Sequence[tuple[int, int]]] | None = None,
    records: Sequence[Sequence[tuple[int, int]]] | None = None,
    snapshots: Sequence[Sequence[int]] | None = None,
    conv_taps: int = 4,
) -> Group:
    rows, width = len(trees), len(trees[0])
    chains = all(tree == chain(width) for tree in trees)
    lengths = torch.zeros(rows, dtype=torch.int64)
    return Group(
        start=0,
        rows=rows,
        width=width,
        state_B=torch.tensor(slots),
        path=None if paths is None else record_ids(paths),
        path_length_B=None if paths is None else torch.tensor([len(path) for path in paths]),
        record=None if records is None else record_ids(records),
        snapshot_BM=None if snapshots is None else torch.tensor(snapshots),
        ancestors_BMM=None if chains else torch.tensor([ancestors(tree) for tree in trees]),
        tap_BMC=None if chains else torch.tensor([taps(tree, conv_taps) for tree in trees]),
        table_BN=torch.zeros(rows, 1, dtype=torch.int64),
        length_B=lengths,
        max_length=0,
    )


def make_memory(layer: Layer, slots: Sequence[int], seed: int = 0) -> RecurrentMemory:
    """Fill the states and windows of `slots` with noise; everything else, including records, is NaN."""
    inputs = layer.taps - 1
    memory = RecurrentMemory(
        poisoned((SLABS,), (layer.heads, layer.key, layer.value), layer.dtype),
        poisoned((SLABS,), (layer.channels, inputs), layer.dtype).mT,
        poisoned((SLABS, PLACES), (layer.heads, layer.value), layer.dtype),
        poisoned((SLABS, PLACES), layer.decays, layer.dtype),
        poisoned((SLABS, PLACES), (layer.channels,), layer.dtype),
    )
    generator = torch.Generator().manual_seed(seed)
    for view in (memory.state_SHKW, memory.window_SIC):
        for slot in slots:
            view[slot] = torch.randn(view[slot].shape, generator=generator, dtype=layer.dtype)
    return memory


def copy_of(memory: RecurrentMemory) -> RecurrentMemory:
    """Copy the memory, including gaps and strides."""
    return RecurrentMemory(
        *(_whole(x).clone().as_strided(x.shape, x.stride(), x.storage_offset()) for x in memory)
    )


def with_inputs(memory: RecurrentMemory, dtype: torch.dtype) -> RecurrentMemory:
    """Change the dtype of the convolution's inputs; records hold none yet."""
    return memory._replace(
        window_SIC=memory.window_SIC.mT.to(dtype).mT,
        input_SRC=torch.full_like(memory.input_SRC, torch.nan, dtype=dtype),
    )


def assert_same_memory(actual: RecurrentMemory, expected: RecurrentMemory, tolerance: float) -> None:
    """Compare every byte: memory not to be written must still be NaN."""
    for name, x, y in zip(RecurrentMemory._fields, actual, expected, strict=True):
        same = torch.allclose(_whole(x), _whole(y), rtol=tolerance, atol=tolerance, equal_nan=True)
        assert same, f"{name} differs"


def poisoned(outer: tuple[int, ...], inner: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a view [*outer, *inner] whose inner parts are dense and have gaps between them."""
    dense, apart = [1], [torch.Size(inner).numel() + 3]
    for length in reversed(inner[1:]):
        dense.insert(0, dense[0] * length)
    for count in reversed(outer[1:]):
        apart.insert(0, apart[0] * count + 7)
    memory = torch.full((apart[0] * outer[0] + 5,), torch.nan, dtype=dtype)
    return memory.as_strided((*outer, *inner), (*apart, *dense), 5)


def _whole(x: Tensor) -> Tensor:
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
