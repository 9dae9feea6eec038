"""Map our tensor names to a checkpoint's: a table of names, and recipes where layouts differ.

A family's table goes from our names to the disk's, so a missing tensor can be reported under its expected
name, and nothing is read before it is requested.
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


class TensorReader(Protocol):
    """A recipe's access to tensors: on the engine's device, in its dtype unless they stay quantised."""

    @property
    def count(self) -> int:
        """Number of tensors in the files."""
        ...

    @property
    def unused(self) -> bool:
        """Return whether the result is discarded: the recipe then only names what it would read."""
        ...

    def read(self, disk: str, shape: Shape) -> Matrix: ...

    def height(self, disk: str) -> int | None:
        """Return the rows of a tensor in the files, or None if it is absent."""
        ...

    def widen(self, matrix: Matrix, disk: str) -> Tensor:
        """Widen a quantised matrix, and note its name."""
        ...

    def empty(self, shape: Shape, like: Matrix) -> Matrix: ...

    def unlike(self, disk: str) -> None:
        """Note that an expert's format differs from that of earlier ones."""
        ...


Recipe = Callable[[TensorReader, tuple[str, ...], Shape], Matrix]


def copy(reader: TensorReader, disk: tuple[str, ...], shape: Shape) -> Matrix:
    """Return the tensor unchanged."""
    return reader.read(disk[0], shape)


def stored_as(stored: Callable[[Shape], Shape]) -> Recipe:
    """Return a recipe for a tensor that is stored in another shape of the same size."""

    def reshape(reader: TensorReader, disk: tuple[str, ...], shape: Shape) -> Matrix:
        weight = reader.read(disk[0], stored(shape))
        return weight if reader.unused else reader.widen(weight, disk[0]).view(shape)

    return reshape


squeeze_conv = stored_as(lambda shape: (shape[0], 1, shape[1]))
"""Drop the axis of size one from a depthwise convolution's weight [C, 1, K]."""


def join_convs(*heights: int) -> Recipe:
    """Return a recipe that joins depthwise convolutions [C, 1, K], split by channels or anywhere else."""

    def join(reader: TensorReader, disk: tuple[str, ...], shape: Shape) -> Matrix:
        found = [reader.height(name) for name in disk]
        stored = [height for height in found if height is not None]
        # A saver that has one convolution may have split it into equal parts.
        sizes = stored if len(stored) == len(disk) and sum(stored) == sum(heights) else heights
        parts = [squeeze_conv(reader, (name,), (n, shape[1])) for name, n in zip(disk, sizes, strict=True)]
        return parts[0] if reader.unused else torch.cat([part for part in parts if isinstance(part, Tensor)])

    return join


def join_heads(*heights: int) -> Recipe:
    """Return a recipe that interleaves matrices [H, N, D] by head, given each one's rows per head."""

    def join(reader: TensorReader, disk: tuple[str, ...], shape: Shape) -> Matrix:
        parts = [
            reader.widen(reader.read(name, (shape[0], height, shape[2])), name)
            for name, height in zip(disk, heights, strict=True)
        ]
        return parts[0] if reader.unused else torch.cat(parts, dim=1)

    return join


def rows(order: Callable[[], Tensor], total: int) -> Recipe:
    """Return a recipe that selects rows of a larger projection in an order.

    FP8 is preserved if whole blocks move. The order is only computed once the stored row count is known to
    match.
    """

    def choose(reader: TensorReader, disk: tuple[str, ...], shape: Shape) -> Matrix:
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
    """Return the rows of some kinds in a projection that repeats `widths` for each head."""
    row = torch.arange(heads * sum(widths)).view(heads, -1)
    parts = torch.split_with_sizes(row, list(widths), dim=1)
    return torch.cat([parts[kind].flatten() for kind in kinds])


def stack(reader: TensorReader, disk: tuple[str, ...], shape: Shape) -> Matrix:
    """Stack experts that are stored one by one, with the parts of each (gate, up) stacked too.

    FP8 is preserved if parts end at a block's end. No more experts are looked up than there are tensors:
    reporting the first absent one is enough.
    """
    experts, height = shape[0], shape[1] // len(disk)
    is_aligned = len(disk) == 1 or height % BLOCK == 0
    out_END: Matrix | None = None
    for expert in range(min(experts, reader.count + 1)):
        for part, template in enumerate(disk):
            name = numbered(template, expert)
            weight_ND = reader.read(name, (height, *shape[2:]))
            if reader.unused:
                continue
            if isinstance(weight_ND, Fp8) and not is_aligned:
                weight_ND = reader.widen(weight_ND, name)
            if out_END is None:
                out_END = reader.empty(shape, like=weight_ND)
            _place(reader, weight_ND, out_END, expert, part * height, name)
    return weight_ND if out_END is None else out_END


def _place(
    reader: TensorReader, weight_ND: Matrix, out_END: Matrix, expert: int, first: int, disk: str
) -> None:
    """Write one part of an expert's matrix, starting at row `first`."""
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
class TensorRule:
    """A tensor's location by our name.

    `ours` is a regular expression for our names; `disk` are the disk names that its groups expand to: `~` is
    replaced by the prefix of the model's body, `{e}` by each expert's number. Of several rules for one name,
    the first with present tensors applies.
    """

    ours: str
    disk: str | tuple[str, ...]
    recipe: Recipe = copy


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The disk tensors of one parameter, and the recipe that builds it."""

    disk: tuple[str, ...]
    recipe: Recipe

    def present(self, names: Collection[str], experts: int) -> bool:
        """Return whether any of the source's tensors is present."""
        spread = range(min(experts, len(names))) if "{e}" in self.disk[0] else range(1)
        return any(numbered(template, e) in names for template in self.disk for e in spread)


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """A family's table for one network.

    `prefixes` are the possible values of `~`, detected by the embedding's name; `ignored` are expressions for
    disk names that the network does not use; `head` matches those of the multi-token head.
    """

    rules: tuple[TensorRule, ...]
    prefixes: tuple[str, ...]
    embedding: str
    ignored: tuple[str, ...] = ()
    head: str = r"mtp\..*"

    def prefix(self, names: Collection[str]) -> str:
        """Return this checkpoint's prefix of the body."""
        matching = (p for p in self.prefixes if p + self.embedding in names)
        return next(matching, self.prefixes[0])

    def sources(self, ours: str, prefix: str) -> Iterator[TensorSource]:
        """Yield the possible sources of our tensor, the preferred one first."""
        for rule in self.rules:
            if match := re.fullmatch(rule.ours, ours):
                templates = (rule.disk,) if isinstance(rule.disk, str) else rule.disk
                # expand() would interpret a backslash in the prefix, so the prefix is inserted afterwards.
                disk = tuple(match.expand(template).replace("~", prefix) for template in templates)
                yield TensorSource(disk, rule.recipe)

    def wanted(self, names: Iterable[str], *, mtp: bool) -> frozenset[str]:
        """Return the disk names without those ignored on purpose."""
        ignored = re.compile("|".join(self.ignored if mtp else (*self.ignored, self.head)))
        return frozenset(name for name in names if not ignored.fullmatch(name))


def layer_rules(ours: str, *names: str, recipe: Recipe = copy) -> Iterator[TensorRule]:
    r"""Yield the rules for a layer's tensor, in the body and in the multi-token head (which has no prefix).

    Groups of `ours` count from \2 on: the first is the layer's number.
    """
    for stack_ours, stack_disk in (("", "~"), (r"mtp\.", "mtp.")):
        yield TensorRule(
            rf"{stack_ours}layers\.(\d+)\.{ours}",
            tuple(rf"{stack_disk}layers.\1.{name}" for name in names),
            recipe,
        )
