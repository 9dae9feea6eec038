"""Problems of the recurrent operations: they read states and records in an arena of their own.

The layers of the arena are the sets of buffers: each call works on the next layer's states.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.bench import traffic
from specdec.bench.excerpt import excerpt, tokens_of
from specdec.bench.problems import Bench, Planned, Problem, Sizes, on_cpu, row_error, sample
from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.mamba.layer import MambaLayer
from specdec.kernels.table import Kernels
from specdec.models.mixers import GatedDeltaNet, Mamba2, Place
from specdec.models.weights import RandomWeights
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import Layout, StateShape
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window

BACKINGS = ("plain", "record", "snapshot")
"""`plain`: certain tokens, no draft; what the other two hold can be taken back."""
DECAY, STATE = 0.1, 0.3
"""Scales of the noise."""

RecurrentMixer = GatedDeltaNet | Mamba2


@dataclass(frozen=True, slots=True)
class Shape:
    """What both kinds of recurrent layer have: G key heads for H heads, a state [K, W], C channels."""

    groups: int
    heads: int
    key: int
    value: int
    taps: int

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.key + self.heads * self.value

    def __str__(self) -> str:
        return f"{self.heads}x{self.key}x{self.value}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's parameters."""

    own: DeltaLayer | MambaLayer
    conv_C: Tensor | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a layer's operations are fed: by token, and the keys of the pending paths by row."""

    projected_TN: Tensor
    x_TC: Tensor
    q_TGK: Tensor
    k_TGK: Tensor
    v_THW: Tensor
    decay_TH: Tensor
    beta_TH: Tensor | None
    k_path_BPGK: Tensor | None

    def excerpt(self, tokens: list[int], rows: list[int]) -> "Inputs":
        """Copy some rows' part to the host."""
        picked: dict[str, Any] = {}
        for field in fields(self):
            held = getattr(self, field.name)
            at = rows if field.name == "k_path_BPGK" else tokens
            picked[field.name] = None if held is None else held[at].cpu()
        return Inputs(**picked)


Run = Callable[[Kernels, Layer, Inputs, RecurrentMemory, Group], Tensor | None]


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    run: Run
    by_row: bool = False
    """The result is a path's, row by row, not a token's."""


def _delta_net(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    assert isinstance(layer.own, DeltaLayer)
    return ops.delta_net(own.projected_TN, layer.own, memory, group)


def _mamba(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    assert isinstance(layer.own, MambaLayer)
    return ops.mamba(own.projected_TN, layer.own, memory, group)


def _recur(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    fed = own.q_TGK, own.k_TGK, own.v_THW, own.decay_TH, own.beta_TH
    return ops.scan_window(*fed, memory, group, own.k_path_BPGK)


def _causal_conv(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    return ops.causal_conv(own.x_TC, layer.own.conv_CK, layer.conv_C, memory, group)


def _path_conv(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    weight_CK = layer.own.conv_CK
    return ops.path_conv(weight_CK, layer.conv_C, slice(0, len(weight_CK)), memory, *_pending(group))


def _path_keys(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    assert isinstance(layer.own, DeltaLayer)
    return ops.path_keys(layer.own, memory, *_pending(group))


def _mamba_keys(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> Tensor:
    assert isinstance(layer.own, MambaLayer)
    return ops.mamba_keys(layer.own, memory, *_pending(group))


def _fold(ops: Kernels, layer: Layer, own: Inputs, memory: RecurrentMemory, group: Group) -> None:
    ops.fold(memory, *_pending(group), own.k_path_BPGK)


def _pending(group: Group) -> tuple[Tensor, RecordIds, Tensor]:
    assert group.path is not None and group.path_length_B is not None
    return group.state_B, group.path, group.path_length_B


LAYERS: dict[type, tuple[Operation, Operation]] = {
    GatedDeltaNet: (Operation("delta_net", _delta_net), Operation("path_keys", _path_keys, by_row=True)),
    Mamba2: (Operation("mamba", _mamba), Operation("mamba_keys", _mamba_keys, by_row=True)),
}
"""What a kind of layer is between its projections, and the keys of its pending paths."""


def plan(bench: Bench, sizes: Sizes) -> Iterator[Planned]:
    """List the problems of a shape at one load."""
    kinds: dict[type, RecurrentMixer] = {}
    for mixer in sizes.network.mixers():
        if isinstance(mixer, RecurrentMixer):
            kinds.setdefault(type(mixer), mixer)
    for mixer in kinds.values():
        yield from _plan(bench, sizes, mixer)


def _plan(bench: Bench, sizes: Sizes, mixer: RecurrentMixer) -> Iterator[Planned]:
    shape, size = shape_of(mixer), traffic.recurrent(mixer.state_shape(), bench.dtype.itemsize)
    between, keys = LAYERS[type(mixer)]
    rows, width, path = sizes.batch, sizes.window, path_length(sizes.window)
    tokens, inner = rows * width, shape.heads * shape.value
    fed = traffic.pointwise((tokens, shape.channels + inner + 2 * shape.heads), item=traffic.WIDE)
    around = traffic.pointwise((tokens, columns(mixer) + inner), item=bench.dtype.itemsize)

    def planned(operation: Operation, backing: str, moved: int) -> Planned:
        layers = bench.sets(moved)
        slots = 1 + rows * (1 + (width if backing == "snapshot" else 0))
        needs = layers * slots * (size.state + size.window) + rows * size.state
        build = partial(problem, bench, sizes, mixer, operation, backing, moved)
        made = sizes.plan(operation.name, f"{shape} {backing}", needs, build)
        return replace(made, backing=backing)

    for backing in BACKINGS:
        counted = size, rows, width, path, backing
        yield planned(between, backing, traffic.states(*counted) + around)
        yield planned(Operation("scan_window", _recur), backing, traffic.scan_window(*counted) + fed)
        yield planned(Operation("causal_conv", _causal_conv), backing, traffic.conv(*counted))
    share = shape.groups * shape.key / shape.channels
    yield planned(keys, "record", traffic.path_conv(size, rows, path, share))
    whole = traffic.path_conv(size, rows, path, 1.0)
    yield planned(Operation("path_conv", _path_conv, by_row=True), "record", whole)
    yield planned(Operation("fold", _fold), "record", traffic.fold(size, rows, path))


def problem(
    bench: Bench, sizes: Sizes, mixer: RecurrentMixer, operation: Operation, backing: str, moved: int
) -> Problem:
    """Put rows into an arena and draw what a layer works on."""
    shape = shape_of(mixer)
    arena, group = _hold(bench, sizes, shape, backing, layers=bench.sets(moved))
    layer, own = _layer(bench, mixer), _inputs(bench, group, mixer)
    memories = [arena.recurrent(i) for i in range(len(arena.layout.states))]

    def error() -> float:
        rows = sample(group.rows)
        tokens = tokens_of(group, rows)
        excerpts = own.excerpt(tokens, rows)
        memory, small = excerpt(memories[0], group, rows)
        found = operation.run(bench.kernels, layer, own, memories[0], group)
        expected = operation.run(bench.reference, on_cpu(layer), excerpts, memory, small)
        after, _ = excerpt(memories[0], group, rows)
        errors = [row_error(x.flatten(0, 1), y.flatten(0, 1)) for x, y in zip(after, memory, strict=True)]
        if found is not None and expected is not None:
            errors.append(row_error(found[rows if operation.by_row else tokens], expected))
        return max(errors)

    calls = [partial(operation.run, bench.kernels, layer, own, memory, group) for memory in memories]
    return Problem(moved, calls, error)


def shape_of(mixer: RecurrentMixer) -> Shape:
    match mixer:
        case GatedDeltaNet() as m:
            return Shape(m.key_heads, m.value_heads, m.key_dim, m.value_dim, m.conv)
        case Mamba2() as m:
            return Shape(m.groups, m.heads, m.state_dim, m.head_dim, m.conv)


def columns(mixer: RecurrentMixer) -> int:
    """Count what a projection gives a token: the convolution's channels, a gate, and what each head has."""
    shape = shape_of(mixer)
    per_head = 2 if isinstance(mixer, GatedDeltaNet) else 1
    return shape.channels + shape.heads * (shape.value + per_head)


def path_length(window: int) -> int:
    """Say how many records each row has to fold in: what half a window of this width leaves behind."""
    return max(1, window // 2)


def tree(window: int) -> TokenTree:
    """Make a binary tree of the widths that drafts in trees have, a chain of the narrower ones."""
    if window < 4:
        return TokenTree.chain([0] * window)
    return TokenTree((0,) * window, (-1, *((i - 1) // 2 for i in range(1, window))))


def _hold(bench: Bench, sizes: Sizes, shape: Shape, backing: str, *, layers: int) -> tuple[Arena, Group]:
    """Take each row's slots, and fill with noise what the operations read."""
    rows, width, path = sizes.batch, sizes.window, path_length(sizes.window)
    state = StateShape(shape.heads, shape.key, shape.value, shape.taps - 1, shape.channels)
    layout = Layout((), (state,) * layers, bench.dtype)
    slabs = 2 + rows * (1 + (width if backing == "snapshot" else 0))
    slabs += 2 * -(-rows * (path + width) // layout.records_per_slab)
    arena = Arena(layout, slabs * layout.slab_bytes, bench.device)
    arena.data.zero_()  # what is compared and not written must be numbers
    made = []
    for row in range(rows):
        slot, kept = arena.take_state(row), arena.take_records(row, path)
        written = arena.take_records(row, width) if backing == "record" else None
        copies = arena.take_snapshots(row, width) if backing == "snapshot" else None
        assert slot is not None and kept is not None
        window = TokenTree.chain([0] * width) if backing == "plain" else tree(width)
        pending = kept if backing == "record" else ()
        made.append(Row(window, 0, torch.zeros(1, dtype=torch.int64), slot, pending, written, copies))
    (group,) = build_window(made, shape.taps, bench.device).groups
    for i in range(layers):
        _fill(bench, arena.recurrent(i), group, seed=10 * i)
    return arena, group


def _fill(bench: Bench, memory: RecurrentMemory, group: Group, *, seed: int) -> None:
    wide = memory.state_SHKW.dtype
    for slot in group.state_B.tolist():
        memory.state_SHKW[slot] = bench.draw(
            *memory.state_SHKW.shape[1:], dtype=wide, seed=seed + slot, scale=0.3
        )
        memory.window_SIC[slot] = bench.draw(*memory.window_SIC.shape[1:], seed=seed + slot + 1)
    for ids in filter(None, (group.path, group.record)):
        at = ids.slab_BN, ids.index_BN
        count = ids.slab_BN.shape
        memory.update_SRHW[at] = bench.draw(*count, *memory.update_SRHW.shape[2:], dtype=wide, seed=seed + 2)
        decay_BNH = bench.draw(*count, *memory.decay_SRH.shape[2:], dtype=wide, seed=seed + 3)
        memory.decay_SRH[at] = -DECAY * decay_BNH.abs()
        memory.input_SRC[at] = bench.draw(*count, *memory.input_SRC.shape[2:], seed=seed + 4)


def _layer(bench: Bench, mixer: RecurrentMixer) -> Layer:
    """Draw a layer as a random model has it. Its projections, no part of the operations, have one column."""
    weights = RandomWeights(0, bench.dtype, bench.device)
    if isinstance(mixer, GatedDeltaNet):
        delta = mixer.build(weights.within("mixer"), bench.reference, Place(1, 1)).layer
        return Layer(delta, None)
    mamba = mixer.build(weights.within("mixer"), bench.reference, Place(1, 1)).layer
    return Layer(mamba, mamba.conv_C)


def _inputs(bench: Bench, group: Group, mixer: RecurrentMixer) -> Inputs:
    shape, tokens, wide = shape_of(mixer), group.rows * group.width, torch.float32
    q, k = (
        bench.draw(tokens, shape.groups, shape.key, dtype=wide, seed=seed, scale=shape.key**-0.5)
        for seed in (1, 2)
    )
    heads = bench.draw(tokens, shape.heads, dtype=wide, seed=4)
    keys = None
    if group.path is not None:
        count = group.path.slab_BN.shape
        keys = bench.draw(*count, shape.groups, shape.key, dtype=wide, seed=6, scale=shape.key**-0.5)
    return Inputs(
        projected_TN=bench.draw(tokens, columns(mixer), seed=7),
        x_TC=bench.draw(tokens, shape.channels, seed=8),
        q_TGK=q,
        k_TGK=k,
        v_THW=bench.draw(tokens, shape.heads, shape.value, dtype=wide, seed=3),
        decay_TH=-DECAY * heads.abs(),
        beta_TH=heads.sigmoid() if isinstance(mixer, GatedDeltaNet) else None,
        k_path_BPGK=keys,
    )
