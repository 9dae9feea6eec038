"""What a window of several tokens costs beside a window of one: the price of verifying a draft."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.report import Summary, summarise
from specdec.build import Model
from specdec.errors import EngineError
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import RecordSlot, Row, build_window

PROMPT = 64
WARMUP = 3
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""How far the logits of a window may lie from those of its tokens one by one, as a norm."""


class Probe:
    """One sequence that has read a prompt, and windows behind it that it never keeps."""

    def __init__(self, model: Model, widths: Sequence[int]) -> None:
        self.model, self.arena, self.owner = model, model.loop.arena, 0
        self.widest = max(widths)
        self.tokens = [token % model.network.spec.vocab for token in range(1, PROMPT + self.widest + 1)]
        layout = self.arena.layout
        blocks = self.arena.take_blocks(self.owner, layout.blocks_for(len(self.tokens))) or []
        self.table_N = torch.tensor(blocks, dtype=torch.int64)
        self.state = self.arena.take_state(self.owner) if layout.states else 0
        records = [(0, 0)] * (self.widest + 1)
        if layout.states:
            records = self.arena.take_records(self.owner, len(records)) or []
        if self.state is None or not records:
            raise EngineError("the arena cannot hold a window; raise memory_bytes", field="memory_bytes")
        *self.records, self.accepted = records
        """One record per node, and one that stands for a token accepted before."""
        self.run(Row(TokenTree.chain(self.tokens[:PROMPT]), 0, self.table_N, self.state))
        self.run(self.window(1, records=[self.accepted]))

    @torch.inference_mode()
    def run(self, row: Row) -> Tensor:
        loop, network = self.model.loop, self.model.network
        window = build_window([row], loop.conv_width, loop.device)
        return network.logits(network.forward(window, self.arena))

    def window(
        self, width: int, *, start: int = 0, path: Sequence[RecordSlot] = (), records: Sequence[RecordSlot]
    ) -> Row:
        """Return a chain of tokens that may all be taken back, behind an accepted path."""
        at = PROMPT + start
        tree = TokenTree.chain(self.tokens[at : at + width])
        return Row(tree, at, self.table_N, self.state or 0, path, records)

    def check(self) -> None:
        """Compare the widest window with its tokens read one by one; a difference ends the benchmark."""
        found_TV = self.run(self.window(self.widest, records=self.records))
        expected_TV = torch.cat(
            [
                self.run(
                    self.window(1, start=i, path=self.records[i - 1 : i], records=self.records[i : i + 1])
                )
                for i in range(self.widest)
            ]
        )
        error = float((found_TV - expected_TV).norm() / expected_TV.norm())
        if not error <= ROUNDING[self.model.settings.dtype]:
            raise EngineError(
                f"a window's logits are off by {error:.2g}; no figure is shown for a wrong result"
            )

    def time(self, width: int) -> float:
        """Time one step that folds an accepted token and verifies `width` others."""
        row = self.window(width, path=[self.accepted], records=self.records[:width])
        start_s = time.perf_counter()
        self.run(row)
        return time.perf_counter() - start_s


def window_costs(model: Model, widths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Time windows of each width in turn, and divide by the width-1 step of the same round."""
    probe = Probe(model, widths)
    probe.check()
    widths = sorted({1, *widths})
    samples: dict[int, list[float]] = {width: [] for width in widths}
    for round_ in tqdm(range(-WARMUP, repeats), desc="windows", leave=False, disable=None):
        for width in widths:
            took_s = probe.time(width)
            if round_ >= 0:
                samples[width].append(took_s)
    probe.arena.release_owner(probe.owner)
    return [
        {
            "width": width,
            "step_s": summarise(own)._asdict(),
            "ratio": _ratio(own, samples[1])._asdict(),
        }
        for width, own in samples.items()
    ]


def _ratio(own: Sequence[float], ones: Sequence[float]) -> Summary:
    return summarise([a / b for a, b in zip(own, ones, strict=True)])
