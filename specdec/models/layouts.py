"""Where canonical tensors lie in a checkpoint: a table of names, and recipes where the layout differs.

A family's table runs from our names to the disk's, so that a tensor that is missing can be named as
its file should have named it, and nothing is read before it is asked for.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Shape = tuple[int, ...]


class Reader(Protocol):
    """What a recipe works with: tensors already in the engine's dtype and on its device."""

    def read(self, disk: str, shape: Shape) -> Tensor: ...

    def empty(self, shape: Shape) -> Tensor: ...


Recipe = Callable[[Reader, tuple[str, ...], Shape], Tensor]


def copy(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Tensor:
    """Take the tensor as it is."""
    return reader.read(disk[0], shape)


def taps(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Tensor:
    """Drop the axis of size one from a depthwise convolution's weight [C, 1, K]."""
    channels, width = shape
    return reader.read(disk[0], (channels, 1, width)).squeeze(1)


def rows(index_N: Tensor, total: int) -> Recipe:
    """Choose rows of a larger projection, in the order given."""

    def choose(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Tensor:
        weight = reader.read(disk[0], (total, *shape[1:]))
        return weight[index_N.to(weight.device)]

    return choose


def stack(reader: Reader, disk: tuple[str, ...], shape: Shape) -> Tensor:
    """Gather experts stored one by one, the parts of each (gate, up) below one another."""
    experts, height = shape[0], shape[1] // len(disk)
    out_END = reader.empty(shape)
    for expert in range(experts):
        for part, template in enumerate(disk):
            weight_ND = reader.read(_numbered(template, expert), (height, *shape[2:]))
            out_END[expert, part * height : (part + 1) * height] = weight_ND
    return out_END


def _numbered(template: str, expert: int) -> str:
    return template.replace("{e}", str(expert))


@dataclass(frozen=True, slots=True)
class Rule:
    """Say where a canonical tensor lies.

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
        """Tell whether any of the source's tensors is there."""
        spread = range(experts) if "{e}" in self.disk[0] else range(1)
        return any(_numbered(template, e) in names for template in self.disk for e in spread)


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
