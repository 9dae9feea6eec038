"""What a window of several tokens costs beside a window of one: what verifying a draft costs."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.report import Summary, summarise, table
from specdec.errors import EngineError
from specdec.setup.build import Model
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import BACKINGS, Committed
from specdec.state_slots.layout import Layout
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window

PROMPT = 64
WARMUP = 3
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""How far the logits of a window may lie from those of its tokens one by one, as a norm."""


class Probe:
    """A prefilled sequence, and windows behind it; a step promotes the first token alone."""

    def __init__(self, model: Model, arena: Arena, slots: str, widest: int) -> None:
        self.model, self.arena, self.owner = model, arena, slots
        self.backing = BACKINGS[slots](self.arena)
        self.tokens = [token % model.network.spec.vocab for token in range(1, PROMPT + widest + 1)]
        layout = self.arena.layout
        blocks = self.arena.take_blocks(self.owner, layout.blocks_for(len(self.tokens))) or []
        self.table_N = torch.tensor(blocks, dtype=torch.int64)
        state = self.arena.take_state(self.owner) if layout.states else 0
        assert state is not None
        self.committed = Committed(state)
        self.run(Row(TokenTree.chain(self.tokens[:PROMPT]), 0, self.table_N, state))

    @torch.inference_mode()
    def run(self, row: Row) -> Tensor:
        """Return the logits of every token of a window."""
        loop, network = self.model.loop, self.model.network
        window = build_window([row], loop.arena.layout.conv_width, loop.device)
        return network.logits(network.forward(window, self.arena))

    def step(self, width: int, start: int = 0) -> tuple[Tensor, float]:
        """Verify a chain of `width` tokens and keep its first; return the logits and the seconds it took.

        The KV of what is kept is written over by the next window, so every step costs the same.
        """
        tree = TokenTree.chain(self.tokens[PROMPT + start :][:width])
        start_s = time.perf_counter()
        slots = self.backing.begin(self.owner, width)
        assert slots is not None
        row = Row(tree, PROMPT + start, self.table_N, self.committed.state, self.committed.path)
        logits_TV = self.run(self.backing.dress(row, slots))
        self.committed = self.backing.promote(self.owner, self.committed, slots, [0])
        return logits_TV, time.perf_counter() - start_s

    def release(self) -> None:
        """Give everything back."""
        self.arena.release_owner(self.owner)


def room_for(layout: Layout, widest: int, device: torch.device) -> Arena:
    """Make an arena for one probe of each backing: its prompt, its state, and two windows' slots."""
    blocks = layout.blocks_for(PROMPT + widest) * layout.block_bytes
    slabs = 2 + -(-blocks // layout.slab_bytes)
    records = 2 + 2 * widest * layout.record_bytes // layout.slab_bytes
    return Arena(layout, (1 + 2 * slabs + records + 2 * widest) * layout.slab_bytes, device)


def check(model: Model, arena: Arena, slots: str, widest: int) -> None:
    """Compare the widest window with its tokens read one by one; a difference ends the benchmark."""
    whole = Probe(model, arena, slots, widest)
    found_TV, _ = whole.step(widest)
    whole.release()
    single = Probe(model, arena, slots, widest)
    expected_TV = torch.cat([single.step(1, start)[0] for start in range(widest)])
    single.release()
    error = float((found_TV - expected_TV).norm() / expected_TV.norm())
    if not error <= ROUNDING[model.settings.dtype]:
        raise EngineError(f"a window's logits are off by {error:.2g}; no figure is shown for a wrong result")


def window_costs(model: Model, widths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Time windows of each width and backing in turn, beside the width-1 step of its backing and round."""
    widths = sorted({1, *widths})
    layout = model.loop.arena.layout
    arena = room_for(layout, widths[-1], model.loop.device)
    backings = tuple(BACKINGS) if layout.states else ("record",)
    for slots in backings:
        check(model, arena, slots, widths[-1])
    probes = {slots: Probe(model, arena, slots, widths[-1]) for slots in backings}
    samples: dict[tuple[str, int], list[float]] = {(slots, width): [] for slots in probes for width in widths}
    for round_ in tqdm(range(-WARMUP, repeats), desc="windows", leave=False, disable=None):
        for slots, width in samples:
            _, took_s = probes[slots].step(width)
            if round_ >= 0:
                samples[slots, width].append(took_s)
    for probe in probes.values():
        probe.release()
    return [
        {
            "slots": slots,
            "width": width,
            "step_s": summarise(own)._asdict(),
            "ratio": _ratio(own, samples[slots, 1])._asdict(),
            "borrowed_bytes": probes[slots].backing.bytes_per_token() * width,
            "written_bytes": written_bytes(layout, slots, width),
        }
        for (slots, width), own in samples.items()
    ]


def written_bytes(layout: Layout, slots: str, width: int) -> int:
    """Count what a step writes of states and records: records are folded once, snapshots written whole."""
    if slots == "snapshot":
        return width * layout.state_bytes
    return layout.state_bytes + width * layout.record_bytes


def _ratio(own: Sequence[float], ones: Sequence[float]) -> Summary:
    return summarise([a / b for a, b in zip(own, ones, strict=True)])


def window_table(windows: Sequence[Mapping[str, Any]]) -> str:
    """Lay what windows cost out for people."""
    return table(
        [
            {
                "slots": own["slots"],
                "window": str(own["width"]),
                "ms/step": f"{own['step_s']['median'] * 1e3:.2f}",
                "p10-p90": f"{own['step_s']['p10'] * 1e3:.2f}-{own['step_s']['p90'] * 1e3:.2f}",
                "time / window of 1": f"{own['ratio']['median']:.2f}",
                "borrows MB": f"{own['borrowed_bytes'] / 1e6:.2f}",
                "writes MB": f"{own['written_bytes'] / 1e6:.2f}",
            }
            for own in windows
        ]
    )
