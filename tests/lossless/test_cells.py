"""The cells of the GPU tests, on a CPU: they run, and detect errors."""

from typing import Any

import pytest
import torch

from specdec.core.batch import ScheduledRequest
from specdec.core.loop import DecodeLoop
from specdec.verify.walk import AcceptedPath
from tests.kernels.problems import LOADS, bench_of, problems
from tests.lossless.cells import Family
from tests.tolerances import FLOAT32_GAP, TENSOR_CORE_GAP
from tools.bench.timing import Machine
from tools.kernels.bench import measure


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("cells"), "qwen3_5", device="cpu", kernels="cpu")


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_float32_cells_part_at_ties_alone(family: Family, shape: str) -> None:
    before = family.texts
    found = list(family.partings("oracle", shape, "record"))
    assert family.texts - before > 25
    assert [parting for parting in found if not parting.gap < FLOAT32_GAP] == []


def test_a_walk_that_accepts_unchosen_tokens_is_detected(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = DecodeLoop._walk

    def wrong(self: DecodeLoop, row: ScheduledRequest, choices: Any) -> AcceptedPath:
        path = right(self, row, choices)
        if row.is_drafted and len(path.emitted) == 1 and len(row.tree) > 1:
            return AcceptedPath((0, 1), (row.tree.tokens[1], choices[1].token))
        return path

    monkeypatch.setattr(DecodeLoop, "_walk", wrong)
    assert any(not parting.gap < TENSOR_CORE_GAP for parting in family.partings("ngram", "chain", "record"))


@pytest.mark.parametrize(("batch", "window"), LOADS[2:])
def test_cases_hold_on_a_cpu(batch: int, window: int) -> None:
    bench = bench_of("cpu", torch.device("cpu"), torch.float32)
    rows = [
        measure(bench, Machine(1e10, 1e-6), problem, 1)
        for problem in problems(bench, "experts", batch=batch, window=window)
    ]
    assert [row for row in rows if row["status"] != "ok"] == []
