"""Attention problems, with KV in their own arena, whose layers are the buffer sets."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.group import Group
from specdec.models.mixers import Attention, MixerPlacement
from specdec.models.weights import RandomWeights
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import KVShape, Layout
from specdec.state_slots.window import Row, build_window
from tools.kernels import traffic
from tools.kernels.excerpt import excerpt_pages, tokens_of
from tools.kernels.problems import Bench, Planned, Problem, Sizes, on_cpu, row_error, sample
from tools.kernels.window_problems import path_length, tree


def plan(bench: Bench, sizes: Sizes) -> Iterator[Planned]:
    """List the problems of a shape at one load."""
    mixers = [mixer for mixer in sizes.network.mixers() if isinstance(mixer, Attention)]
    if not mixers:
        return
    mixer, item = mixers[0], bench.dtype.itemsize
    detail = f"{mixer.heads}:{mixer.kv_heads}x{mixer.head_dim} behind {sizes.context}"
    moved = traffic.attention(mixer, sizes.batch, sizes.window, sizes.context, item)
    needs = 2 * bench.sets(moved) * moved
    yield sizes.plan("self_attention", detail, needs, partial(_self_attention, bench, sizes, mixer, moved))
    path = path_length(sizes.window)
    less = traffic.move(mixer, sizes.batch, path, item)
    yield sizes.plan("move", f"{path} of {detail}", needs, partial(_move, bench, sizes, mixer, path, less))


def _self_attention(bench: Bench, sizes: Sizes, mixer: Attention, moved: int) -> Problem:
    arena, group, position_T = _hold(bench, sizes, mixer, layers=bench.sets(moved))
    weights = RandomWeights(0, bench.dtype, bench.device)
    layer = mixer.build(weights.within("mixer"), bench.reference, MixerPlacement(1, 1)).layer
    projected_TN = bench.draw(group.rows * group.width, sum(layer.widths), seed=3)
    rope = mixer.rope
    rotation = bench.reference.rope_table(position_T, rope.dim, rope.theta, rope.scaling) if rope else None
    pages = [arena.pages(i) for i in range(len(arena.layout.kv))]

    def call(own: Tensor) -> Tensor:
        return bench.kernels.self_attention(projected_TN, layer, rotation, own, group)

    def error() -> float:
        rows = sample(group.rows)
        tokens = tokens_of(group, rows)
        copied, small = excerpt_pages(pages[0], group, rows)
        found_TN = call(pages[0])[tokens]
        turned = None
        if rotation is not None:
            cos_TR, sin_TR = rotation
            turned = cos_TR[tokens].cpu(), sin_TR[tokens].cpu()
        expected_TN = bench.reference.self_attention(
            projected_TN[tokens].cpu(), on_cpu(layer), turned, copied, small
        )
        after, _ = excerpt_pages(pages[0], group, rows)
        return max(row_error(found_TN, expected_TN), row_error(after.flatten(0, 2), copied.flatten(0, 2)))

    return Problem(moved, [partial(call, page) for page in pages], error)


def _move(bench: Bench, sizes: Sizes, mixer: Attention, path: int, moved: int) -> Problem:
    arena, group, _ = _hold(bench, sizes, mixer, layers=bench.sets(moved))
    length_B1 = group.length_B[:, None]
    order = torch.arange(path, device=bench.device)
    from_BP = length_B1 + (sizes.window - path) + order
    to_BP = length_B1 + order
    pages = [arena.pages(i) for i in range(len(arena.layout.kv))]

    def error() -> float:
        rows = sample(group.rows)
        copied, small = excerpt_pages(pages[0], group, rows)
        bench.kernels.move(pages[0], group.table_BN, from_BP, to_BP)
        bench.reference.move(copied, small.table_BN, from_BP[rows].cpu(), to_BP[rows].cpu())
        after, _ = excerpt_pages(pages[0], group, rows)
        return row_error(after.flatten(0, 2), copied.flatten(0, 2))

    calls = [partial(bench.kernels.move, page, group.table_BN, from_BP, to_BP) for page in pages]
    return Problem(moved, calls, error)


def _hold(bench: Bench, sizes: Sizes, mixer: Attention, *, layers: int) -> tuple[Arena, Group, Tensor]:
    """Allocate each row's blocks, fill them with noise, and build the windows after the context."""
    layout = Layout((KVShape(mixer.kv_heads, mixer.head_dim),) * layers, (), bench.dtype)
    blocks = layout.blocks_for(sizes.context + sizes.window)
    slabs = 2 + -(-sizes.batch * blocks // layout.blocks_per_slab)
    arena = Arena(layout, slabs * layout.slab_bytes, bench.device)
    rows = []
    for row in range(sizes.batch):
        taken = arena.take_blocks(row, blocks)
        assert taken is not None
        rows.append(Row(tree(sizes.window), sizes.context, torch.tensor(taken), 0))
    window = build_window(rows, 1, bench.device)
    for i in range(layers):
        pages = arena.pages(i)
        pages.copy_(bench.draw(*pages.shape, seed=i))
    return arena, window.groups[0], window.position_T
