"""Recurrent layers between their projections: operations, with random parameters and inputs."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.mamba.layer import MambaLayer
from specdec.kernels.selective_scan.layer import SelectiveLayer
from specdec.kernels.table import Kernels
from specdec.models.mixers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Lightning,
    Mamba1,
    Mamba2,
    MixerPlacement,
    ShortConv,
)
from specdec.models.mixers.gated_delta_net import LoadedGatedDeltaNet
from specdec.models.mixers.kda import LoadedKimiDeltaAttention
from specdec.models.mixers.lightning import LoadedLightning
from specdec.models.mixers.mamba1 import LoadedMamba1
from specdec.models.mixers.mamba2 import LoadedMamba2
from specdec.models.weights import RandomWeights
from tools.kernels import traffic
from tools.kernels.problems import Bench

DECAY = 0.1
"""Scale of log-decays, and of the step sizes in records."""

RecurrentMixer = GatedDeltaNet | KimiDeltaAttention | Lightning | Mamba1 | Mamba2 | ShortConv


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes common to all: G key heads for H heads, a state [K, W], C convolution channels."""

    groups: int
    heads: int
    key: int
    value: int
    taps: int
    channels: int
    decays: int
    """Decays per head: one, or one per key."""

    @property
    def inner(self) -> int:
        return self.heads * self.value

    def __str__(self) -> str:
        if not self.heads:
            return f"{self.channels} of {self.taps}"
        return f"{self.heads}x{self.key}x{self.value}{' by key' if self.decays > 1 else ''}"


def shape_of(mixer: RecurrentMixer) -> Shape:
    state = mixer.state_shape()
    match mixer:
        case GatedDeltaNet():
            groups = mixer.key_heads
        case Mamba2():
            groups = mixer.groups
        case _:
            groups = state.heads
    sizes = state.heads, state.key_dim, state.value_dim
    return Shape(groups, *sizes, state.conv_inputs + 1, state.channels, state.decay_dim)


def columns(mixer: RecurrentMixer) -> int:
    """Return a projection's outputs per token: convolution channels, gate, and the per-head values."""
    shape = shape_of(mixer)
    per_head = 1 if isinstance(mixer, Mamba2) else 1 + shape.decays
    return shape.channels + shape.heads * (shape.value + per_head)


@dataclass(frozen=True, slots=True)
class Load:
    """One layer's sizes in bytes, and the load: rows, their windows and pending paths."""

    size: traffic.Recurrent
    rows: int
    width: int
    path: int
    backing: str
    item: int

    @property
    def counted(self) -> tuple[traffic.Recurrent, int, int, int, str]:
        return self.size, self.rows, self.width, self.path, self.backing

    @property
    def tokens(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's parameters."""

    own: DeltaLayer | MambaLayer | SelectiveLayer | None
    conv_CK: Tensor
    conv_C: Tensor | None = None
    silu: bool = True


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a layer's operations: by token, and by row those for recomputing the convolution of paths."""

    projected_TN: Tensor
    x_TC: Tensor
    q_TGK: Tensor
    k_TGK: Tensor
    v_THW: Tensor
    gate_THW: Tensor
    decay_TH: Tensor
    """For Mamba-1, the step sizes before softplus."""
    beta_TH: Tensor | None
    path_BP: Tensor | None

    def excerpt(self, tokens: list[int], rows: list[int]) -> "Inputs":
        """Return the inputs of some rows, copied to the host."""
        picked: dict[str, Any] = {}
        for field in fields(self):
            held = getattr(self, field.name)
            at = rows if field.name == "path_BP" else tokens
            picked[field.name] = None if held is None else held[at].cpu()
        return Inputs(**picked)


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    run: Callable[[Kernels, Layer, Inputs, RecurrentMemory, Group], Tensor | None]
    moved: Callable[[RecurrentMixer, Load], int]
    """The bytes it must move."""
    by_row: bool = False
    """Whether the result is by row (a path's) rather than by token."""


def _delta_net(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    assert isinstance(layer.own, DeltaLayer)
    return ops.delta_net(own.projected_TN, layer.own, memory, group)


def _mamba(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    assert isinstance(layer.own, MambaLayer)
    return ops.mamba(own.projected_TN, layer.own, memory, group)


def _scan_window(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    fed = own.q_TGK, own.k_TGK, own.v_THW, own.decay_TH, own.beta_TH
    return ops.scan_window(*fed, memory, group, own.path_BP)


def _selective_scan(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    assert isinstance(layer.own, SelectiveLayer)
    fed = own.v_THW, own.gate_THW, own.decay_TH, own.k_TGK, own.q_TGK
    return ops.selective_scan(*fed, layer.own, memory, group, own.path_BP)


def _causal_conv(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    return ops.causal_conv(own.x_TC, layer.conv_CK, layer.conv_C, memory, group, silu=layer.silu)


def _path_conv(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    channels = slice(0, len(layer.conv_CK))
    return ops.path_conv(layer.conv_CK, layer.conv_C, channels, memory, *_pending(group))


def _path_keys(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    assert isinstance(layer.own, DeltaLayer)
    return ops.path_keys(layer.own, memory, *_pending(group))


def _mamba_keys(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    assert isinstance(layer.own, MambaLayer)
    return ops.mamba_keys(layer.own, memory, *_pending(group))


def _fold(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> None:
    ops.fold(memory, *_pending(group), own.path_BP)


def _fold_selective(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> None:
    assert isinstance(layer.own, SelectiveLayer) and own.path_BP is not None
    ops.fold_selective(layer.own, memory, *_pending(group), own.path_BP)


def _pending(group: Group) -> tuple[Tensor, RecordIds, Tensor]:
    assert group.path is not None and group.path_length_B is not None
    return group.state_B, group.path, group.path_length_B


def _by_layer(mixer: RecurrentMixer, load: Load) -> int:
    around = (load.tokens, columns(mixer) + shape_of(mixer).inner)
    return traffic.states(*load.counted) + traffic.pointwise(around, item=load.item)


def _by_scan(mixer: RecurrentMixer, load: Load) -> int:
    s = shape_of(mixer)
    fed = (load.tokens, 2 * s.groups * s.key + 2 * s.inner + s.heads * (s.decays + 1))
    return traffic.scan_window(*load.counted) + traffic.pointwise(fed, item=traffic.WIDE)


def _by_selective_scan(mixer: RecurrentMixer, load: Load) -> int:
    """Return the bytes of inputs, gates, steps, outputs, keys and queries; A has a row state's size."""
    s = shape_of(mixer)
    fed = (load.tokens, 4 * s.inner + 2 * s.key)
    return traffic.scan_window(*load.counted) + load.size.state + traffic.pointwise(fed, item=load.item)


def _by_conv(mixer: RecurrentMixer, load: Load) -> int:
    return traffic.conv(*load.counted)


def _by_path_conv(mixer: RecurrentMixer, load: Load) -> int:
    return traffic.path_conv(load.size, load.rows, load.path, 1.0)


def _by_keys(mixer: RecurrentMixer, load: Load) -> int:
    s = shape_of(mixer)
    return traffic.path_conv(load.size, load.rows, load.path, s.groups * s.key / s.channels)


def _by_fold(mixer: RecurrentMixer, load: Load) -> int:
    return traffic.fold(load.size, load.rows, load.path)


DELTA = Operation("delta_net", _delta_net, _by_layer)
SCAN = Operation("scan_window", _scan_window, _by_scan)
CONV = Operation("causal_conv", _causal_conv, _by_conv)
DELTA_KEYS = Operation("path_keys", _path_keys, _by_keys, by_row=True)
PATH_CONV = Operation("path_conv", _path_conv, _by_path_conv, by_row=True)
FOLD = Operation("fold", _fold, _by_fold)
OPERATIONS: dict[type, tuple[tuple[Operation, ...], tuple[Operation, ...]]] = {
    GatedDeltaNet: ((DELTA, SCAN, CONV), (DELTA_KEYS, PATH_CONV, FOLD)),
    KimiDeltaAttention: ((DELTA, SCAN, CONV), (DELTA_KEYS, PATH_CONV, FOLD)),
    Lightning: ((SCAN, CONV), (PATH_CONV, FOLD)),
    Mamba1: (
        (Operation("selective_scan", _selective_scan, _by_selective_scan), CONV),
        (PATH_CONV, Operation("fold_selective", _fold_selective, _by_fold)),
    ),
    Mamba2: (
        (Operation("mamba", _mamba, _by_layer), SCAN, CONV),
        (Operation("mamba_keys", _mamba_keys, _by_keys, by_row=True), PATH_CONV, FOLD),
    ),
    ShortConv: ((CONV,), (FOLD,)),
}
"""The operations of each layer type on a window, and on pending paths."""


def draw_layer(bench: Bench, mixer: RecurrentMixer) -> Layer:
    """Draw a layer with random weights. Its projections, which are not measured, have one column."""
    weights = RandomWeights(0, bench.dtype, bench.device).within("mixer")
    match built := mixer.build(weights, bench.reference, MixerPlacement(1, 1)):
        case LoadedGatedDeltaNet() | LoadedKimiDeltaAttention():
            return Layer(built.layer, built.layer.conv_CK)
        case LoadedMamba2():
            return Layer(built.layer, built.layer.conv_CK, built.layer.conv_C)
        case LoadedMamba1():
            return Layer(built.layer, built.conv_CK, built.conv_C)
        case LoadedLightning():
            return Layer(None, built.tap_C1)
        case _:
            return Layer(None, built.conv_CK, built.conv_C, silu=False)


def draw_inputs(bench: Bench, group: Group, mixer: RecurrentMixer) -> Inputs:
    """Draw the operations' inputs in the dtypes that they receive."""
    s, tokens, selective = shape_of(mixer), group.rows * group.width, isinstance(mixer, Mamba1)
    dtype = bench.dtype if selective else torch.float32
    unit = max(s.key, 1) ** -0.5
    q, k = (bench.draw(tokens, s.groups, s.key, dtype=dtype, seed=seed, scale=unit) for seed in (1, 2))
    by_head = (tokens, s.heads, s.decays) if s.decays > 1 else (tokens, s.heads)
    decay = -DECAY * bench.draw(*by_head, dtype=dtype, seed=4).abs()
    beta = bench.draw(tokens, s.heads, dtype=dtype, seed=5).sigmoid()
    path = None
    if group.path is not None and s.heads:
        again = (s.heads, s.value) if selective else (s.groups, s.key)
        path = bench.draw(*group.path.slab_BN.shape, *again, dtype=dtype, seed=6, scale=unit)
    return Inputs(
        projected_TN=bench.draw(tokens, columns(mixer), seed=7),
        x_TC=bench.draw(tokens, s.channels, seed=8),
        q_TGK=q,
        k_TGK=k,
        v_THW=bench.draw(tokens, s.heads, s.value, dtype=dtype, seed=3),
        gate_THW=bench.draw(tokens, s.heads, s.value, seed=9),
        decay_TH=bench.draw(tokens, s.heads, s.value, seed=10) if selective else decay,
        beta_TH=beta if isinstance(mixer, GatedDeltaNet | KimiDeltaAttention) else None,
        path_BP=path,
    )
