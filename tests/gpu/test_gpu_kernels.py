"""Every operation on a GPU against its reference on the host: small odd sizes, then those of real models."""

import pytest
import torch

from specdec.models.families import network
from specdec.models.shapes import SHAPES
from tests.kernels.problems import LOADS, NETWORKS, bench_of, problems
from tools.bench.timing import Machine
from tools.kernels.bench import measure

pytestmark = pytest.mark.gpu

MACHINE = Machine(1e12, 1e-6)
REAL = ("qwen3-next-80b-a3b", "qwen3.5-27b", "nemotron-h-8b")
RECURRENT = ("jamba-mini", "kimi-linear-48b", "lfm2-8b-a1b", "minimax-text-01")
"""Models whose attention and feed-forward layers resemble those of the models above."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "window"), LOADS)
@pytest.mark.parametrize("name", NETWORKS)
def test_small_operations_equal_their_references(
    name: str, batch: int, window: int, dtype: torch.dtype
) -> None:
    bench = bench_of("triton", torch.device("cuda"), dtype)
    rows = [measure(bench, MACHINE, p, 1) for p in problems(bench, name, batch=batch, window=window)]
    assert [row for row in rows if row["status"] != "ok"] == []


@pytest.mark.parametrize(("batch", "window"), [(1, 1), (3, 8), (2, 16)])
@pytest.mark.parametrize("name", REAL)
def test_operations_of_real_models_equal_their_references(name: str, batch: int, window: int) -> None:
    bench = bench_of("triton", torch.device("cuda"), torch.bfloat16)
    planned = problems(bench, name, batch=batch, window=window, of=network(SHAPES[name]))
    rows = [measure(bench, MACHINE, problem, 1) for problem in planned]
    assert [row for row in rows if row["status"] != "ok"] == []


@pytest.mark.parametrize(("batch", "window"), [(1, 1), (3, 8), (2, 16)])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_of_real_models_equal_their_references(name: str, batch: int, window: int) -> None:
    bench = bench_of("triton", torch.device("cuda"), torch.bfloat16)
    planned = problems(bench, name, batch=batch, window=window, of=network(SHAPES[name]))
    rows = [measure(bench, MACHINE, problem, 1) for problem in planned if problem.backing]
    assert [row for row in rows if row["status"] != "ok"] == []
