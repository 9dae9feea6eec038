"""Memory follows a load from many short to few long requests and back, while drafts continue."""

import statistics
from pathlib import Path

import pytest

from specdec import SpecEngine
from tests.core.swing import Load, swing
from tests.lossless.test_prefixes import DRAFTS, VOCAB, folder
from tests.selection import EXHAUSTIVE

__all__ = ["folder"]
LOADS = (Load(120, 12, 20), Load(6, 400, 60), Load(120, 12, 20))


@pytest.mark.parametrize(("draft", "prefix_cache"), [("mtp", True), ("suffix", False)])
@EXHAUSTIVE
def test_both_ends_of_a_swing_fill_the_arena(folder: Path, draft: str, prefix_cache: bool) -> None:
    fields = {"dtype": "float64", "max_model_len": 512, "memory_bytes": 1_200_000, **DRAFTS[draft]}
    with SpecEngine(folder, prefix_cache=prefix_cache, **fields) as engine:
        for end in swing(engine, LOADS, VOCAB):
            assert statistics.median(end.slabs) > 0.9 and end.full(0.9) > 0.5
            # Requests alone; the slabs of such a small model have 20 to 40 % padding.
            assert statistics.median(end.bytes) > 0.7
            assert end.drafted > 100
        assert engine.stats().failed_steps == 0
