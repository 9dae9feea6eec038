"""Problems of the recurrent operations, on states and records in their own arena.

The arena's layers are the buffer sets: each call works on the next layer's states.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from specdec.kernels.group import Group, RecurrentMemory
from specdec.models.mixers import Mamba1
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import Layout
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from tools.kernels import traffic
from tools.kernels.excerpt import excerpt, tokens_of
from tools.kernels.problems import Bench, Planned, Problem, Sizes, on_cpu, row_error, sample
from tools.kernels.recurrent_layers import (
    DECAY,
    OPERATIONS,
    Load,
    Operation,
    RecurrentMixer,
    draw_inputs,
    draw_layer,
    shape_of,
)

BACKINGS = ("plain", "record", "snapshot")
"""`plain` has no drafts; the drafts of the other two can be rolled back."""
STATE = 0.3
"""Scale of a state's values."""


def plan(bench: Bench, sizes: Sizes) -> Iterator[Planned]:
    """List the problems of a shape at one load."""
    kinds: dict[type, RecurrentMixer] = {}
    for mixer in sizes.network.mixers():
        if isinstance(mixer, RecurrentMixer):
            kinds.setdefault(type(mixer), mixer)
    for mixer in kinds.values():
        of_window, of_path = OPERATIONS[type(mixer)]
        for backing in BACKINGS:
            for operation in of_window:
                yield _planned(bench, sizes, mixer, operation, backing)
        for operation in of_path:
            yield _planned(bench, sizes, mixer, operation, "record")


def _planned(
    bench: Bench, sizes: Sizes, mixer: RecurrentMixer, operation: Operation, backing: str
) -> Planned:
    item, rows, width = bench.dtype.itemsize, sizes.batch, sizes.window
    size = traffic.recurrent(mixer.state_shape(), item)
    moved = operation.moved(mixer, Load(size, rows, width, path_length(width), backing, item))
    slots = 1 + rows * (1 + (width if backing == "snapshot" else 0))
    needs = bench.sets(moved) * slots * (size.state + size.window) + rows * size.state
    build = partial(problem, bench, sizes, mixer, operation, backing, moved)
    made = sizes.plan(operation.name, f"{shape_of(mixer)} {backing}", needs, build)
    return replace(made, backing=backing)


def problem(
    bench: Bench, sizes: Sizes, mixer: RecurrentMixer, operation: Operation, backing: str, moved: int
) -> Problem:
    """Allocate rows in an arena and draw a layer's inputs."""
    arena, group = _hold(bench, sizes, mixer, backing, layers=bench.sets(moved))
    layer, own = draw_layer(bench, mixer), draw_inputs(bench, group, mixer)
    memories = [arena.recurrent(i) for i in range(len(arena.layout.states))]

    def error() -> float:
        rows = sample(group.rows)
        tokens = tokens_of(group, rows)
        excerpts = own.excerpt(tokens, rows)
        memory, small = excerpt(memories[0], group, rows)
        found = operation.run(bench.kernels, layer, own, memories[0], group)
        expected = operation.run(bench.reference, on_cpu(layer), excerpts, memory, small)
        after, _ = excerpt(memories[0], group, rows)
        # A pure convolution layer has an empty state, a layer without convolution an empty window.
        kept = [(x.flatten(0, 1), y.flatten(0, 1)) for x, y in zip(after, memory, strict=True) if x.numel()]
        if found is not None and expected is not None:
            kept.append((found[rows if operation.by_row else tokens], expected))
        return max(row_error(x, y) for x, y in kept)

    calls = [partial(operation.run, bench.kernels, layer, own, memory, group) for memory in memories]
    return Problem(moved, calls, error)


def path_length(window: int) -> int:
    """Return the number of pending records per row: half the window was accepted."""
    return max(1, window // 2)


def tree(window: int) -> TokenTree:
    """Return a binary tree, or for windows below 4 a chain."""
    if window < 4:
        return TokenTree.chain([0] * window)
    return TokenTree((0,) * window, (-1, *((i - 1) // 2 for i in range(1, window))))


def _hold(
    bench: Bench, sizes: Sizes, mixer: RecurrentMixer, backing: str, *, layers: int
) -> tuple[Arena, Group]:
    """Allocate each row's slots, and fill the operations' memory with noise."""
    rows, width, path = sizes.batch, sizes.window, path_length(sizes.window)
    state = mixer.state_shape()
    layout = Layout((), (state,) * layers, bench.dtype)
    slabs = 2 + rows * (1 + (width if backing == "snapshot" else 0))
    slabs += 2 * -(-rows * (path + width) // layout.records_per_slab)
    arena = Arena(layout, slabs * layout.slab_bytes, bench.device)
    arena.data.zero_()  # compared entries that are not written must be finite
    made = []
    for row in range(rows):
        slot, kept = arena.take_state(row), arena.take_records(row, path)
        written = arena.take_records(row, width) if backing == "record" else None
        copies = arena.take_snapshots(row, width) if backing == "snapshot" else None
        assert slot is not None and kept is not None
        window = TokenTree.chain([0] * width) if backing == "plain" else tree(width)
        pending = kept if backing == "record" else ()
        made.append(Row(window, 0, torch.zeros(1, dtype=torch.int64), slot, pending, written, copies))
    (group,) = build_window(made, layout.conv_width, bench.device).groups
    if not state.conv_inputs:
        group = replace(group, tap_BMC=None)  # A single tap is the node itself, in a tree as in a chain.
    for i in range(layers):
        _fill(bench, arena.recurrent(i), group, seed=10 * i, steps=isinstance(mixer, Mamba1))
    return arena, group


def _fill(bench: Bench, memory: RecurrentMemory, group: Group, *, seed: int, steps: bool) -> None:
    """Draw states, windows and records; `steps`: records hold step sizes, which are positive."""
    wide = memory.state_SHKW.dtype
    for slot in group.state_B.tolist():
        memory.state_SHKW[slot] = bench.draw(
            *memory.state_SHKW.shape[1:], dtype=wide, seed=seed + slot, scale=STATE
        )
        memory.window_SIC[slot] = bench.draw(*memory.window_SIC.shape[1:], seed=seed + slot + 1)
    for ids in filter(None, (group.path, group.record)):
        at = ids.slab_BN, ids.index_BN
        count = ids.slab_BN.shape
        update_BNHW = bench.draw(*count, *memory.update_SRHW.shape[2:], dtype=wide, seed=seed + 2)
        memory.update_SRHW[at] = DECAY * update_BNHW.abs() if steps else update_BNHW
        decay_BNH = bench.draw(*count, *memory.decay_SRH.shape[2:], dtype=wide, seed=seed + 3)
        memory.decay_SRH[at] = -DECAY * decay_BNH.abs()
        memory.input_SRC[at] = bench.draw(*count, *memory.input_SRC.shape[2:], seed=seed + 4)
