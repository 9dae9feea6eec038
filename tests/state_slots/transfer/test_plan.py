"""Plans read every byte of a slot from the rank that has it, and nothing beside the arenas."""

import numpy as np
import torch

from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.transfer.cut import Cut
from specdec.state_slots.transfer.plan import ArenaView, make_plans

QWEN = Layout(
    (KVShape(2, 256),) * 13,
    (StateShape(32, 128, 128, 3, 8192, runs=((16, 128), (16, 128), (32, 128))),) * 36,
    torch.bfloat16,
)


def view(layout: Layout = QWEN, slabs: int = 5, base: int = 1 << 20) -> ArenaView:
    return ArenaView(base, slabs * layout.slab_bytes, Cut.of(layout), 1, 0, 0)


def test_equal_sizes_take_one_row_for_blocks_and_one_for_states() -> None:
    plan = make_plans(view(), [view(slabs=7, base=1 << 30)])[0]
    block, state, slab, per_slab = QWEN.block_bytes, QWEN.state_bytes, QWEN.slab_bytes, QWEN.blocks_per_slab
    assert plan.local.tolist() == [[1 << 20, block, 0, block, 5 * per_slab], [1 << 20, state, 0, slab, 5]]
    assert plan.remote.tolist() == [[1 << 30, block, 0, block, 7 * per_slab], [1 << 30, state, 0, slab, 7]]
    local, remote = plan.pick([(per_slab, 3 * per_slab), (9 + per_slab, 4)], (2, 6))
    assert local.dtype == remote.dtype == np.int32
    assert local.tolist() == [per_slab, 9 + per_slab, 5 * per_slab + 2]
    assert remote.tolist() == [3 * per_slab, 4, 7 * per_slab + 6]
    assert plan.num_bytes(2, 1) == 2 * block + state
    assert [len(ids) for ids in plan.pick([], None)] == [0, 0]
