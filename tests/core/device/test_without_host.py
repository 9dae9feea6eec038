"""The captured GPU step is independent of the host: it uses no host tensor and reads no value."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.core.device.graph_key import GraphKey
from specdec.core.device.step import DeviceStep
from specdec.draft.proposal import DraftShape
from specdec.setup.build import LoadedModel
from tests.core.device.without_host import AsksTheHostError, make, watched
from tests.kernels.sm90 import CASES

HEADS = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
SHAPES = {"qwen3-next": CASES["qwen3-next"][0], "nemotron-h": {**CASES["nemotron-h"][0], **HEADS}}
TREE = {"draft": "mtp", "num_steps": 4, "topk": 4, "num_draft_tokens": 8}
CHAIN = {"draft": "mtp", "num_steps": 3, "topk": 1, "num_draft_tokens": 4}
DRAFTS: dict[str, dict[str, Any]] = {
    "tree": TREE,
    "chain": CHAIN,
    "looked-up": {"draft": "suffix", "num_draft_tokens": 8},
    "none": {"draft": "none"},
    "rates": {**CHAIN, "synthetic_acceptance": 2.5, "kv_dtype": "fp8"},
    "window": {**TREE, "draft_window": 64},
}
KEPT = [
    *itertools.product(("tree", "chain"), ("record", "snapshot")),
    *(("looked-up", "record"), ("none", "record"), ("rates", "record"), ("window", "snapshot")),
]
"""Drafters, and the backings of draft slots."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not made for the interpreter")


def step_of(model: LoadedModel) -> DeviceStep:
    runner = model.loop.runner
    assert runner
    return runner.batch.step


def keys_of(model: LoadedModel) -> Iterator[GraphKey]:
    """Yield the graph keys that would be captured, also by adaptive engines, greedy and sampled."""
    runner = model.loop.runner
    assert runner
    keys = dict.fromkeys(runner.graph_keys())
    if model.settings.drafters:
        keys |= dict.fromkeys(GraphKey.given(nodes, filtered=True) for nodes in (1, 2, 4))
    if model.loop.speculation.head:
        keys |= dict.fromkeys(
            GraphKey.drafting(shape, reads=True, filtered=True) for shape in (None, DraftShape(1, 1, 2))
        )
    for key, filtered in itertools.product(keys, (True, False)):
        yield replace(key, filtered=filtered)


def run(model: LoadedModel, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] = (1, 3)) -> set[str]:
    """Run every key for each number of rows; return the kernels launched."""
    runner = model.loop.runner
    assert runner
    with watched(monkeypatch) as watch:
        for size, key in itertools.product(sizes, keys_of(model)):
            runner.batch.step(runner.batch.rows.part(0, size), key)
    assert watch.operators.total() > 100
    return {name.rpartition(".")[2] for name in watch.kernels}


@pytest.mark.parametrize(("drafts", "slots"), KEPT)
@pytest.mark.parametrize("family", SHAPES)
def test_a_captured_step_asks_the_host_for_nothing(
    family: str, drafts: str, slots: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = {"quantize": "fp8"} if family == "qwen3-next" else {}
    model = make(monkeypatch, SHAPES[family], slots=slots, **DRAFTS[drafts], **quantize)
    launched = run(model, monkeypatch)
    assert {"_linear", "_experts", "_attend", "_window", "_part"} <= launched, launched


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_products_of_whole_numbers_ask_the_host_for_nothing(
    quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(monkeypatch, SHAPES["qwen3-next"], **TREE, quantize=quantize)
    assert {"_linear_integers", "_experts"} <= run(model, monkeypatch, sizes=(1, 3, 20))


Mutant = Callable[[torch.Tensor], torch.Tensor]
MUTANTS: dict[str, Mutant] = {
    "item": lambda count_B: count_B + int(count_B.max().item()),
    "branch": lambda count_B: count_B if count_B.any() else count_B + 1,
    "mask": lambda count_B: count_B[count_B > 0],
    "list": lambda count_B: count_B + len(count_B.tolist()),
    "copy": lambda count_B: count_B + count_B.cpu().shape[0],
    "number": lambda count_B: count_B + torch.tensor(1),
    "table": lambda count_B: count_B + torch.arange(len(count_B)),
}
"""Forbidden operations on the accepted counts."""


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_step_that_asks_or_meets_the_host_is_caught(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same step with one line changed."""
    model, walk = make(monkeypatch, SHAPES["qwen3-next"], **CHAIN), DeviceStep._walk

    def mutated(self: DeviceStep, *given: Any) -> Any:
        node_BM, count_B = walk(self, *given)[:2]
        return node_BM, mutant(count_B), walk(self, *given)[2]

    run(model, monkeypatch, sizes=(3,))
    monkeypatch.setattr(DeviceStep, "_walk", mutated)
    with pytest.raises(AsksTheHostError):
        run(model, monkeypatch, sizes=(3,))


def test_a_kernel_that_is_handed_memory_of_the_host_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for kernels, which torch operators do not see, and for lengths read on the host."""
    model = make(monkeypatch, SHAPES["qwen3-next"], **TREE)
    step = step_of(model)
    assert step.drafter
    table, pack = step.drafter.table_3DR, step.pack
    step.drafter.table_3DR = torch.zeros(table.shape, dtype=table.dtype)
    with pytest.raises(AsksTheHostError, match=r"tree\.triton\._children meets a tensor of cpu"):
        run(model, monkeypatch)
    step.drafter.table_3DR, step.pack = table, replace(pack, asks=True)
    with pytest.raises(
        AsksTheHostError, match=r"_local_scalar_dense\.default: .* cannot be called on meta tensors"
    ):
        run(model, monkeypatch)
    step.pack = pack
    run(model, monkeypatch)
