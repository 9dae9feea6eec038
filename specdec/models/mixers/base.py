"""What a mixer is: data that says what it keeps and costs, and that builds the layer which runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.table import Kernels
from specdec.models.rope import Rope, Rotations
from specdec.models.weights import Weights
from specdec.state_slots.layout import KVShape, StateShape
from specdec.state_slots.window import Window


class Memory(Protocol):
    """The arena's views, by the running number of the attention or recurrent layer."""

    first_passes: int
    """Passes over it that were first of their form or recorded: what they took comes once."""

    def pages(self, layer: int) -> Tensor: ...

    def recurrent(self, layer: int) -> RecurrentMemory: ...


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares."""

    window: Window
    memory: Memory
    rope: Rotations
    kernels: Kernels
    embed_TD: Tensor | None = None
    """The embeddings as they entered the stream, where a layer has a side input."""

    def by_group(self, run: Callable[[Group], Tensor]) -> Tensor:
        """Run an operation on each group and put the results back in packed order."""
        groups = self.window.groups
        return run(groups[0]) if len(groups) == 1 else torch.cat([run(group) for group in groups])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a mixer stands: the widths it reads and writes, and its numbers among the arena's views."""

    reads: int
    writes: int
    kv: int = 0
    state: int = 0
    lender: "LoadedMixer | None" = None
    """The mixer of an earlier layer whose weights it uses."""

    def after(self, *mixers: "Mixer") -> "Place":
        """Return the place of what follows on these mixers."""
        kv = sum(mixer.kv_shape() is not None for mixer in mixers)
        states = sum(mixer.state_shape() is not None for mixer in mixers)
        return replace(self, kv=self.kv + kv, state=self.state + states, lender=None)


class LoadedMixer(ABC):
    """A mixer with its weights, at its place; with no state there is nothing to fold, with no KV to move."""

    @abstractmethod
    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """Mix the window's tokens; what the arena keeps of this layer is advanced as the groups ask."""

    def fold(  # noqa: B027
        self, memory: Memory, slot_B: Tensor, path: RecordIds, length_B: Tensor
    ) -> None:
        """Bring this layer's states up to date with their rows' accepted records, in place."""

    def move(  # noqa: B027
        self, memory: Memory, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor
    ) -> None:
        """Move keys and values to other positions of their rows, in place."""


class Mixer(ABC):
    """One kind of token mixing with its sizes: a frozen dataclass.

    To add a kind, write one file with a subclass and the `LoadedMixer` that it builds.
    """

    __slots__ = ()

    kind: ClassVar[str]
    """What people call it."""
    backings: ClassVar[frozenset[str]] = frozenset({"record", "snapshot"})
    """The forms of draft slots that it can take tokens back in; one without a state supports any."""

    def kv_shape(self) -> KVShape | None:
        """Return what it keeps of each token, if it attends."""
        return None

    def state_shape(self) -> StateShape | None:
        """Return what it keeps of a whole sequence, if it is recurrent."""
        return None

    def ropes(self) -> tuple[Rope, ...]:
        """List the rotary tables that it reads."""
        return ()

    @abstractmethod
    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        """Name the matrices that every token is multiplied by, with their sizes [out, in]."""

    def token_flops(self) -> float:
        """Count a token's arithmetic beside the matrices: convolution and state."""
        return 0.0

    def pair_flops(self) -> float:
        """Count the arithmetic of a token and one that it attends to, itself included."""
        return 0.0

    def reach(self) -> int | None:
        """Return to how many tokens one attends at most, itself included; None: to all before it."""
        return None

    @abstractmethod
    def build(self, weights: Weights, kernels: Kernels, place: Place) -> LoadedMixer:
        """Take the weights, by names relative to the layer's."""


def load_conv(weights: Weights, channels: int, kernel_size: int) -> Tensor:
    """Load a depthwise convolution in float32, laid out [K, C]: an offset's channels are read together."""
    return weights.take("conv.weight", (channels, kernel_size), torch.float32).t().contiguous().t()
