"""Recurrent layers with random weights, run on one group at a time over a memory of `trees`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.native.compiled import compiled
from specdec.kernels.table import load_kernels
from specdec.models.mixers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Lightning,
    LoadedMixer,
    Mamba2,
    MixerPlacement,
    ShortConv,
    Step,
)
from specdec.models.weights import Scoped, Weights
from specdec.state_slots.window import Window
from tests.kernels import trees

HIDDEN = 24
STATES = ("delta net", "delta net, 1 to 1", "mamba-2", "kda")
KINDS = (*STATES, "lightning", "short conv")
"""Lightning attention uses the recurrence of Mamba-2; the last one has only a window."""
KERNEL_SETS = [
    ("reference", torch.float64),
    ("cpu", torch.float64),
    ("cpu", torch.float32),
    *([("native", torch.float32)] if compiled() else []),
]


class RandomWeights:
    """Random weights with slow decays, so that errors persist in a state."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        noise = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if name == "A_log":
            noise -= 3
        elif len(shape) == 2:
            noise *= shape[1] ** -0.5
        return noise.to(dtype or self.dtype)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.take(name, shape)

    def has(self, name: str) -> bool:
        return True

    def within(self, prefix: str) -> Weights:
        return Scoped(self, prefix)


@dataclass(frozen=True)
class OneLayer:
    """An arena of one recurrent layer."""

    memory: RecurrentMemory

    def pages(self, layer: int) -> Tensor:
        raise AssertionError

    def recurrent(self, layer: int) -> RecurrentMemory:
        return self.memory


class Mixer:
    """Run a layer on packed inputs [B * M, HIDDEN] of one group; the caller owns the memory."""

    def __init__(self, kind: str, kernels: str, dtype: torch.dtype) -> None:
        self.kernels, self.dtype = load_kernels(kernels), dtype
        weights = RandomWeights(dtype)
        self.layer: LoadedMixer
        if kind == "mamba-2":
            self.sizes = trees.Layer(heads=6, key=5, value=7, channels=6 * 7 + 2 * 2 * 5, dtype=dtype)
            mamba = Mamba2(6, 7, 2, 5, 4, True, True, 1e-5, (0.0, float("inf")))
            self.layer = mamba.build(weights, self.kernels, MixerPlacement(HIDDEN, HIDDEN))
        elif kind == "kda":
            self.sizes = trees.Layer(heads=3, key=6, value=6, channels=3 * 3 * 6, dtype=dtype, by_key=True)
            kda = KimiDeltaAttention(3, 6, 4, 1e-5, gate_rank=5)
            self.layer = kda.build(weights, self.kernels, MixerPlacement(HIDDEN, HIDDEN))
        elif kind == "lightning":
            self.sizes = trees.Layer(heads=4, key=6, value=6, taps=1, channels=4 * 6, dtype=dtype)
            lightning = Lightning(4, 6, decay_scale=0.3, eps=1e-6)
            self.layer = lightning.build(weights, self.kernels, MixerPlacement(HIDDEN, HIDDEN))
        elif kind == "short conv":
            self.sizes = trees.Layer(heads=0, channels=HIDDEN, dtype=dtype)
            self.layer = ShortConv(HIDDEN, 4, True).build(
                weights, self.kernels, MixerPlacement(HIDDEN, HIDDEN)
            )
        else:
            heads = 2 if kind.endswith("1 to 1") else 4
            self.sizes = trees.Layer(heads=heads, key=6, value=5, channels=2 * 2 * 6 + heads * 5, dtype=dtype)
            delta = GatedDeltaNet(2, heads, 6, 5, 4, 1e-6)
            self.layer = delta.build(weights, self.kernels, MixerPlacement(HIDDEN, HIDDEN))

    def inputs(self, tokens: int, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(self.dtype)

    def memory(self, slots: Sequence[int]) -> RecurrentMemory:
        return trees.make_memory(self.sizes, slots)

    def run(self, x_TD: Tensor, memory: RecurrentMemory, group: Group) -> Tensor:
        nothing = torch.zeros(0, dtype=torch.int64)
        step = Step(Window(nothing, nothing, (group,), (0,)), OneLayer(memory), {}, self.kernels)
        return self.layer(x_TD, step)

    def feed(self, x_TD: Tensor, memory: RecurrentMemory, slot: int) -> Tensor:
        """Run tokens without drafts."""
        return self.run(x_TD, memory, trees.build_group([trees.chain(len(x_TD))], [slot]))

    def fold(
        self, memory: RecurrentMemory, slots: Sequence[int], paths: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        path: RecordIds = trees.record_ids(paths)
        lengths_B = torch.tensor([len(path) for path in paths])
        self.layer.fold(OneLayer(memory), torch.tensor(slots), path, lengths_B)
