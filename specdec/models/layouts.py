"""Where canonical tensors lie in a checkpoint: a table of names, and recipes where the layout differs.

A family's table runs from our names to the disk's, so that a tensor that is missing can be named as
its file should have named it, and nothing is read before it is asked for.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.linear.fp8 import BLOCK, Fp8, choose_rows
from specdec.kernels.linear.integers import Integers
from specdec.kernels.linear.matrix import Matrix

Shape = tuple[int, ...]


class Reader(Protocol):
    """What a recipe works with: tensors on the engine's device, in its dtype unless they stay narrower."""

    @property
    def count(self) -> int:
        """How many tensors the files hold."""
        ...

    @property
    def unused(self) -> bool:
        """Return whether what the recipe makes is not used: it only names what it would read."""
        ...

    def read(self, disk: str, shape: Shape) -> Matrix: ...

    def height(self, disk: str) -> int | None:
        """Return how many rows a tensor of the files has, if it is there."""
        ...

    def widen(self, matrix: Matrix, disk: str) -> Tensor:
        """Give up on the fewer bits of a matrix, and note its name."""
        ...

    def empty(self, shape: Shape, like: Matrix) -> Matrix: ...

    def unlike(self, disk: str) -> None:
        """Note that an expert is not stored as those before it are."""
        ...


Recipe = Callable[[Reader, tuple[str, ...], Shape], Matrix]


def copy(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Matrix:
    """Take the tensor as it is."""
    return reader.read(disk[0], shape)


def stored_as(stored: Callable[[Shape], Shape]) -> Recipe:
    """Take a tensor that the files hold in another shape of as many entries."""

    def reshape(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Matrix:
        weight = reader.read(disk[0], stored(shape))
        return weight if reader.unused else reader.widen(weight, disk[0]).view(shape)

    return reshape


squeeze_conv = stored_as(lambda shape: (shape[0], 1, shape[1]))
"""Drop the axis of size one from a depthwise convolution's weight [C, 1, K]."""


def join_convs(*heights: int) -> Recipe:
    """Join depthwise convolutions [C, 1, K] into one, each with its channels, or cut anywhere else."""

    def join(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Matrix:
        found = [reader.height(name) for name in disk]
        stored = [height for height in found if height is not None]
        # A saver that knows one convolution may have cut it into equal parts.
        sizes = stored if len(stored) == len(disk) and sum(stored) == sum(heights) else heights
        parts = [squeeze_conv(reader, (name,), (n, shape[1])) for name, n in zip(disk, sizes, strict=True)]
        return parts[0] if reader.unused else torch.cat([part for part in parts if isinstance(part, Tensor)])

    return join


def join_heads(*heights: int) -> Recipe:
    """Interleave matrices [H, N, D] head by head, given each one's rows in a head."""

    def join(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Matrix:
        parts = [
            reader.widen(reader.read(name, (shape[0], height, shape[2])), name)
            for name, height in zip(disk, heights, strict=True)
        ]
        return parts[0] if reader.unused else torch.cat(parts, dim=1)

    return join


def rows(order: Callable[[], Tensor], total: int) -> Recipe:
    """Choose rows of a larger projection, in the order given; an FP8 one stays so if whole blocks move.

    The order is listed once the files are known to have that number of rows.
    """

    def choose(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Matrix:
        weight = reader.read(disk[0], (total, *shape[1:]))
        if reader.unused:
            return weight
        index_N = order()
        if isinstance(weight, Integers):
            return weight.choose_rows(index_N)
        if isinstance(weight, Fp8):
            if (chosen := choose_rows(weight, index_N)) is not None:
                return chosen
            weight = reader.widen(weight, disk[0])
        return weight[index_N.to(weight.device)]

    return choose


def rows_by_kind(heads: int, widths: Sequence[int], kinds: Sequence[int]) -> Tensor:
    """List the rows of some kinds in a projection that repeats `widths` for each head."""
    row = torch.arange(heads * sum(widths)).view(heads, -1)
    parts = torch.split_with_sizes(row, list(widths), dim=1)
    return torch.cat([parts[kind].flatten() for kind in kinds])


def stack(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Matrix:
    """Gather experts stored one by one, the parts of each (gate, up) below one another.

    FP8 parts stay so where they end with a block. More experts than there are tensors are not looked for:
    the first that is absent is enough.
    """
    experts, height = shape[0], shape[1] // len(disk)
    whole = len(disk) == 1 or height % BLOCK == 0
    out_END: Matrix | None = None
    for expert in range(min(experts, reader.count + 1)):
        for part, template in enumerate(disk):
            name = numbered(template, expert)
            weight_ND = reader.read(name, (height, *shape[2:]))
            if reader.unused:
                continue
            if isinstance(weight_ND, Fp8) and not whole:
                weight_ND = reader.widen(weight_ND, name)
            if out_END is None:
                out_END = reader.empty(shape, like=weight_ND)
            _place(reader, weight_ND, out_END, expert, part * height, name)
    return weight_ND if out_END is None else out_END


def _place(reader: Reader, weight_ND: Matrix, out_END: Matrix, expert: int, first: int, disk: str) -> None:
    """Write one part of an expert's matrix, whose first row is given, into that of all."""
    last = first + weight_ND.shape[0]
    if isinstance(out_END, Fp8) and isinstance(weight_ND, Fp8):
        out_END.weight_ND[expert, first:last] = weight_ND.weight_ND
        out_END.scale_MK[expert, first // BLOCK : -(-last // BLOCK)] = weight_ND.scale_MK
    elif isinstance(out_END, Tensor) and isinstance(weight_ND, Tensor):
        out_END[expert, first:last] = weight_ND
    elif isinstance(out_END, Integers) and isinstance(weight_ND, Integers) and out_END.is_like(weight_ND):
        out_END.place(weight_ND, expert, first)
    else:
        reader.unlike(disk)


def numbered(template: str, expert: int) -> str:
    return template.replace("{e}", str(expert))


@dataclass(frozen=True, slots=True)
class Rule:
    """Where a canonical tensor is.

    `ours` is a regular expression for canonical names; `disk` the names that its groups expand to: `~`
    stands for the prefix of the model's body, `{e}` for each expert's number. Of several rules for one
    name, the first whose tensors are there counts.
    """

    ours: str
    disk: str | tuple[str, ...]
    recipe: Recipe = copy


@dataclass(frozen=True, slots=True)
class Source:
    """Name the disk tensors of one canonical tensor, and how to make it of them."""

    disk: tuple[str, ...]
    recipe: Recipe

    def present(self, names: Collection[str], experts: int) -> bool:
        """Return whether any of the source's tensors is there."""
        spread = range(min(experts, len(names))) if "{e}" in self.disk[0] else range(1)
        return any(numbered(template, e) in names for template in self.disk for e in spread)


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold a family's table for one network.

    `prefixes` are the spellings of `~`, found by the embedding's name; `ignored` are expressions for
    disk names that belong to no part of the network we run; `head` are those of the multi-token head.
    """

    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...]
    embedding: str
    ignored: tuple[str, ...] = ()
    head: str = r"mtp\..*"

    def prefix(self, names: Collection[str]) -> str:
        """Find how this checkpoint spells the body's prefix."""
        found = (p for p in self.prefixes if p + self.embedding in names)
        return next(found, self.prefixes[0])

    def sources(self, ours: str, prefix: str) -> Iterator[Source]:
        """Yield the places where a canonical tensor may lie, the preferred one first."""
        for rule in self.rules:
            if match := re.fullmatch(rule.ours, ours):
                templates = (rule.disk,) if isinstance(rule.disk, str) else rule.disk
                # expand() would read a backslash of the prefix, so the prefix goes in afterwards.
                disk = tuple(match.expand(template).replace("~", prefix) for template in templates)
                yield Source(disk, rule.recipe)

    def wanted(self, names: Iterable[str], *, mtp: bool) -> frozenset[str]:
        """Leave out the disk names that are ignored on purpose."""
        ignored = re.compile("|".join(self.ignored if mtp else (*self.ignored, self.head)))
        return frozenset(name for name in names if not ignored.fullmatch(name))


def layer_rules(ours: str, *names: str, recipe: Recipe = copy) -> Iterator[Rule]:
    r"""Make the rules for a tensor of a layer, in the body and in the multi-token head (which has no prefix).

    Groups of `ours` count from \2 on: the first is the layer's number.
    """
    for stack_ours, stack_disk in (("", "~"), (r"mtp\.", "mtp.")):
        yield Rule(
            rf"{stack_ours}layers\.(\d+)\.{ours}",
            tuple(rf"{stack_disk}layers.\1.{name}" for name in names),
            recipe,
        )
