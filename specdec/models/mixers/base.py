"""Mixer interface: a config dataclass with memory and cost, and the layer that it builds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.table import Kernels
from specdec.models.cut import Cut
from specdec.models.rope import Rope, Rotations
from specdec.models.weights import Weights
from specdec.state_slots.layout import KVShape, StateShape
from specdec.state_slots.window import Window


class ArenaViews(Protocol):
    """The arena's views, by the index of the attention or recurrent layer."""

    first_passes: int
    """Number of passes with one-time costs: the first of a shape, or recorded ones."""

    def pages(self, layer: int) -> Tensor: ...

    def recurrent(self, layer: int) -> RecurrentMemory: ...


@dataclass(frozen=True, slots=True)
class Step:
    """State shared by all layers of one forward pass."""

    window: Window
    memory: ArenaViews
    rope: Rotations
    kernels: Kernels
    embed_TD: Tensor | None = None
    """The embeddings as they entered the stream, for layers with a side input."""

    def by_group(self, run: Callable[[Group], Tensor]) -> Tensor:
        """Run an operation on each group and concatenate the results in packed order."""
        groups = self.window.groups
        return run(groups[0]) if len(groups) == 1 else torch.cat([run(group) for group in groups])


@dataclass(frozen=True, slots=True)
class MixerPlacement:
    """A mixer's place: input and output widths, and its indices in the arena's views."""

    reads: int
    writes: int
    kv: int = 0
    state: int = 0
    lender: "LoadedMixer | None" = None
    """The mixer of an earlier layer whose weights are shared."""

    def after(self, *mixers: "Mixer") -> "MixerPlacement":
        """Return the place after these mixers."""
        kv = sum(mixer.kv_shape() is not None for mixer in mixers)
        states = sum(mixer.state_shape() is not None for mixer in mixers)
        return replace(self, kv=self.kv + kv, state=self.state + states, lender=None)


class LoadedMixer(ABC):
    """A mixer with its weights; `fold` is a no-op without a state, `move` without KV."""

    @abstractmethod
    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """Mix the window's tokens; updates this layer's memory in the arena as the groups specify."""

    def fold(  # noqa: B027
        self, memory: ArenaViews, slot_B: Tensor, path: RecordIds, length_B: Tensor
    ) -> None:
        """Fold the rows' accepted records into this layer's states, in place."""

    def move(  # noqa: B027
        self, memory: ArenaViews, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor
    ) -> None:
        """Move keys and values to other positions of their rows, in place."""


class Mixer(ABC):
    """One kind of token mixing with its sizes: a frozen dataclass.

    To add a kind, write one file with a subclass and the `LoadedMixer` that it builds.
    """

    __slots__ = ()

    kind: ClassVar[str]
    """Human-readable name."""
    backings: ClassVar[frozenset[str]] = frozenset({"record", "snapshot"})
    """Supported ways to roll back drafts; a mixer without a state supports any."""

    def kv_shape(self) -> KVShape | None:
        """Return its KV per token, None without attention."""
        return None

    def state_shape(self) -> StateShape | None:
        """Return its state per sequence, None if it is not recurrent."""
        return None

    def ropes(self) -> tuple[Rope, ...]:
        """Return the rotary tables that it uses."""
        return ()

    @abstractmethod
    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        """Return the matrices that every token is multiplied by, with their sizes [out, in]."""

    def token_flops(self) -> float:
        """Return a token's FLOPs besides the matrices: convolution and state."""
        return 0.0

    def pair_flops(self) -> float:
        """Return the FLOPs per pair of a token and one it attends to, including itself."""
        return 0.0

    def reach(self) -> int | None:
        """Return the attention window in tokens, including the token itself; None: unlimited."""
        return None

    def cut(self, ranks: int) -> tuple[Self, Mapping[str, Cut]]:
        """Return a rank's share of this mixer, and the cut of each tensor that ranks divide.

        The outputs of all ranks are summed. Raise for kinds that cannot be divided, or not by this number.
        """
        raise ConfigError(f"tp: {self.kind} layers run on one rank only; use tp=1.", field="tp")

    @abstractmethod
    def build(self, weights: Weights, kernels: Kernels, placement: MixerPlacement) -> LoadedMixer:
        """Load the weights, by names relative to the layer's."""


def load_conv(weights: Weights, channels: int, kernel_size: int) -> Tensor:
    """Load a depthwise convolution in float32, stored [K, C]: a tap's channels are contiguous."""
    return weights.take("conv.weight", (channels, kernel_size), torch.float32).t().contiguous().t()
