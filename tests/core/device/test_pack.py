"""Windows packed on the device for a head with a limited attention window, compared with the host's."""

from random import Random

import pytest
import torch

from specdec.core.device.extent import Extent
from specdec.core.device.graph_key import GraphKey
from specdec.core.device.pack import Packer, repeat_rows
from specdec.core.device.result import PendingResult, ResultTensors, pack
from specdec.core.device.rows import BatchRows
from specdec.draft.drafter import DraftRequest
from specdec.draft.head import HeadDrafter
from specdec.kernels.sampling.rules import NO_TOKEN
from specdec.kernels.table import load_kernels
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import KVShape, Layout
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import build_window

CPU = torch.device("cpu")
LONGEST, ROWS = 256, 3


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_a_rows_is_written_out_for_its_nodes(rows: int, count: int) -> None:
    x_N = repeat_rows(torch.arange(rows), count)
    assert x_N.tolist() == [b for b in range(rows) for _ in range(count)]
    assert x_N.stride() == (1,), "a kernel adds an index to an address"


def test_a_row_is_given_the_same_blocks_and_positions_on_the_device() -> None:
    rng = Random(4)
    layout = Layout((KVShape(1, 8),), (), torch.float32)
    arena = Arena(layout, 4 * layout.slab_bytes, CPU)
    size, blocks = layout.block_tokens, layout.blocks_for(LONGEST)
    rows = BatchRows.empty(Extent(ROWS, 4, 4, 4), blocks=blocks, hidden=8, dtype=torch.float32, device=CPU)
    for asks in (True, False):
        pack = Packer(load_kernels("cpu"), 1, LONGEST, asks=asks, block_tokens=size)
        for _ in range(40):
            width, last = rng.choice([1, 2, 5]), rng.choice([1, 5, 16, 31, 100, 300])
            starts = [rng.randrange(LONGEST - width) for _ in range(ROWS)]
            rows.table_BN.copy_(torch.stack([torch.randperm(blocks) for _ in range(ROWS)]))
            token_BM = torch.randint(9, (ROWS, width))
            found = pack(rows, token_BM, None, torch.tensor(starts), last=last)
            (group,) = found.groups
            drafter = HeadDrafter(None, arena, None, CPU, 64, window=last)  # type: ignore[arg-type]
            for b, start in enumerate(starts):
                tree = TokenTree.chain(token_BM[b].tolist())
                row = drafter._row(tree, start, DraftRequest(b, 0, (), rows.table_BN[b], None))
                right = build_window([row], 1, CPU)
                assert torch.equal(found.position_T[b * width :][:width], right.position_T)
                assert right.position_T.tolist() == list(range(start, start + width))
                own, read = right.groups[0], layout.blocks_for(row.length + width)
                assert torch.equal(group.table_BN[b, :read], own.table_BN[0, :read])
                assert int(group.length_B[b]) == row.length <= group.max_length
                assert start - size < start - row.length + min(start, last) <= start


@pytest.mark.parametrize("as_drafted", [True, False])
@pytest.mark.parametrize("nodes", [1, 5])
def test_the_host_reads_what_was_packed(nodes: int, as_drafted: bool) -> None:
    chain = torch.arange(-1, nodes - 1).repeat(ROWS, 1)
    token_BM = torch.randint(0, 99, (ROWS, nodes))
    token_BM[1, 3:] = NO_TOKEN  # pads a window
    score_BM = torch.rand(ROWS, nodes, dtype=torch.float64).cumprod(1)
    belief_BM = torch.rand(ROWS, nodes, dtype=torch.float64)
    kept = [nodes, 1, 0]
    node_BM, emitted_BM = torch.randint(0, nodes, (ROWS, nodes)), torch.randint(0, 99, (ROWS, nodes))
    result = ResultTensors(torch.tensor(kept), node_BM, emitted_BM, token_BM, chain, score_BM, belief_BM)
    pending = PendingResult.send(GraphKey.given(nodes, filtered=False), pack(result), as_drafted=as_drafted)
    for b, outcome in zip((2, 1), pending.outcomes((2, 1)), strict=True):
        width = min(nodes, 3) if b == 1 else nodes
        assert outcome.tree == TokenTree.chain(token_BM[b, :width].tolist())
        assert outcome.nodes == tuple(node_BM[b, : kept[b]].tolist())
        assert outcome.emitted == tuple(emitted_BM[b, : kept[b]].tolist())
        assert (outcome.proposal is not None) == (as_drafted and nodes > 1)
        if outcome.proposal:
            assert outcome.proposal.tree == outcome.tree
            assert outcome.proposal.scores == (1.0, *score_BM[b, 1:width].tolist())
            assert outcome.proposal.beliefs == (1.0, *belief_BM[b, 1:width].tolist())
