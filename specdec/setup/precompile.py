"""Run every kernel variant once before requests arrive, since Triton compiles on first use.

Variants depend on properties rather than sizes: the window width up to the next power of two, whether it is a
tree, what it writes, and whether it follows a path or a long text. A window of each kind runs on the dummy
slab, which padding may read and write. Device steps are prepared where they are captured.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.core.loop import DecodeLoop
from specdec.draft.block import BlockDrafter
from specdec.kernels.group import RecordIds
from specdec.kernels.sampling.rules import Rules
from specdec.models.network import LOGITS, Network
from specdec.state_slots.backing import RecordBacking
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window


@torch.inference_mode()
def precompile(loop: DecodeLoop, network: Network, max_length: int) -> None:
    """Run all kinds of windows, sampling rules and rollbacks, without lasting effects."""
    device, head = loop.device, loop.speculation.head
    windows = list(_windows(loop, max_length))
    logits_NV = torch.zeros(0)
    for rows in tqdm(windows, desc="Compiling kernels", unit="window", leave=False, disable=None):
        window = build_window(rows, loop.arena.layout.conv_width, device)
        hidden_TD, aux = network.forward_with_aux(
            window, loop.arena, head.head.aux_hidden_layers if head else ()
        )
        logits_NV = network.logits(hidden_TD[:LOGITS])
        if head:
            after_TD = head.head.forward(window, head.head.combine_hidden_states(hidden_TD, aux), loop.arena)
            head.head.logits(after_TD[:LOGITS])
    _choose(loop, logits_NV[:1])
    if head:
        _grow(loop, network, max_length)
        if head.straight:
            _draft_at_once(loop, network, max_length)
    if loop.speculation.drafters:
        _take_back(loop, network, max_length)


def _windows(loop: DecodeLoop, max_length: int) -> Iterator[list[Row]]:
    """Yield prompts, decode rows, trees, and batches up to the maximum tokens of a step."""
    speculation, scheduler = loop.speculation, loop.scheduler
    widest = min(speculation.policy.bounds.num_draft_tokens, max_length) if speculation.drafters else 1
    chunk = min(scheduler.chunk_tokens, max_length)

    def rows(tree: TokenTree, slots: Sequence[Any] = (), count: int = 1) -> Iterator[list[Row]]:
        """Yield windows at the start of a sequence and after a long one, with a path where possible."""
        for length in (0, max_length - len(tree)):
            path = [(0, 0)] if length and widest > 1 and (slots or len(tree) == 1) else []
            if not _keeps_records(loop):
                path = []
            row = Row(tree, length, _table(loop, max_length), 0, path)
            yield [speculation.backing.with_slots(row, slots)] * count

    for width in _powers(chunk):
        yield from rows(_chain(width))
    for tokens in _powers(scheduler.chunk_tokens + scheduler.max_running * widest):
        if tokens > chunk:
            yield from rows(_chain(chunk), count=-(-tokens // chunk))
    for width in _powers(widest)[1:]:
        yield from rows(_chain(width), _slots(loop, width))
        yield from rows(_star(width), _slots(loop, width))


def _choose(loop: DecodeLoop, logits_1V: Tensor) -> None:
    """Sample at a temperature with and without filters; rank a head's guesses."""
    speculation, place_N = loop.speculation, torch.zeros(1, dtype=torch.int64, device=loop.device)
    for rules in _rules(loop):
        speculation.ranker.kernels.sample(logits_1V, rules, place_N, place_N)
        for count in {1, speculation.policy.bounds.topk} if speculation.head else ():
            speculation.ranker.kernels.topk_with_noise(logits_1V, rules, place_N, place_N, count)


def _grow(loop: DecodeLoop, network: Network, max_length: int) -> None:
    """Run the head on a block, or on trees as it grows them, which may be wider than verified windows."""
    drafter, bounds = loop.speculation.head, loop.speculation.policy.bounds
    assert drafter
    if isinstance(drafter, BlockDrafter):
        block = drafter.head.block
        for length in (0, max(max_length - block, 0)):
            row = Row(_chain(block), length, _table(loop, max(max_length, block)), 0)
            after_BSD = drafter.head.draft(build_window([row], 1, loop.device), loop.arena)
            drafter.head.logits(after_BSD[0])
        return
    read = min(1 + bounds.topk * (bounds.num_steps - 1), max_length)
    for width in _powers(read):
        for length in (0, max_length - width):
            row = Row(_star(width), length, _table(loop, max_length), 0)
            hidden_TD = torch.zeros(
                width, drafter.head.width, dtype=network.embed_VD.dtype, device=loop.device
            )
            drafter.head.forward(build_window([row], 1, loop.device), hidden_TD, loop.arena)


def _draft_at_once(loop: DecodeLoop, network: Network, max_length: int) -> None:
    """Draft a chain in one pass of the head, as host steps do."""
    drafter = loop.speculation.head
    assert drafter and drafter.straight
    place_N = torch.zeros(1, dtype=torch.int64, device=loop.device)
    hidden_TD = torch.zeros(1, drafter.head.width, dtype=network.embed_VD.dtype, device=loop.device)
    levels = min(2, loop.speculation.policy.bounds.num_steps)
    for length in (0, max_length - 1 - levels):
        window = build_window([Row(_chain(1), length, _table(loop, max_length), 0)], 1, loop.device)
        for rules in _rules(loop):
            drafter.straight.unrolled(window, loop.arena, hidden_TD, rules, place_N, levels)


def _rules(loop: DecodeLoop) -> tuple[Rules, Rules]:
    """Return sampling rules of a temperature without and with filters."""
    warm_N = torch.ones(1, device=loop.device)
    return Rules(warm_N), Rules(warm_N, top_p_N=warm_N)


def _take_back(loop: DecodeLoop, network: Network, max_length: int) -> None:
    """Fold a path into its state, and move the KV entries of accepted branches."""
    place_B1 = torch.zeros(1, 1, dtype=torch.int64, device=loop.device)
    if _keeps_records(loop):
        path = RecordIds(place_B1, place_B1)
        network.materialize(loop.arena, place_B1[0], path, place_B1[0])
    table_BN = _table(loop, max_length)[None].to(loop.device)
    for count in _powers(loop.speculation.policy.bounds.num_draft_tokens):
        at_BP = place_B1.expand(1, count)
        network.move(loop.arena, table_BN, at_BP, at_BP)


def _keeps_records(loop: DecodeLoop) -> bool:
    """Return whether accepted drafts are pending records beside a state."""
    return bool(loop.arena.layout.states) and isinstance(loop.speculation.backing, RecordBacking)


def _slots(loop: DecodeLoop, nodes: int) -> Sequence[Any]:
    """Return the dummy slab's slots in the backing's format."""
    if not loop.arena.layout.states:
        return ()
    return [(0, 0)] * nodes if _keeps_records(loop) else [0] * nodes


def _table(loop: DecodeLoop, max_length: int) -> Tensor:
    return torch.zeros(loop.arena.layout.blocks_for(max_length), dtype=torch.int64)


def _chain(width: int) -> TokenTree:
    return TokenTree.chain([0] * width)


def _star(width: int) -> TokenTree:
    """Return a tree with all nodes below the root; with two nodes it is a chain."""
    return TokenTree((0,) * width, (-1, *[0] * (width - 1)))


def _powers(limit: int) -> list[int]:
    """Return the powers of two below a number, and the number."""
    return [*(1 << i for i in range((limit - 1).bit_length())), limit]
