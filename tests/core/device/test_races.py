"""No two programs of a launch conflict in memory: whole steps, in the interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from specdec import SamplingParams, SpecEngine
from specdec.kernels.linear import fp8
from specdec.kernels.linear import triton as linear
from specdec.kernels.linear.integers import INT4
from specdec.kernels.self_attention import triton as attention
from tests.kernels.races import Race, watched
from tests.kernels.test_attention_triton import make_layer
from tests.models.agreeing import write_agreeing
from tests.selection import only

TREE = {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}
CHAIN = {"num_steps": 2, "topk": 1}
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"draft": "eagle", "draft_window": 5, **CHAIN, "dtype": "bfloat16"},
    "qwen3_5": {"draft": "mtp", **TREE, "slots": "record"},
    "qwen3_5_moe": {"draft": "mtp", **CHAIN, "slots": "snapshot"},
    "nemotron_h": {"draft": "mtp", **TREE, "slots": "record"},
}
PARAMS = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)


PADDING = {Race("self_attention.triton._ready", "pages"), Race("kv_cache.triton._move", "pages")}
"""Padding rows write their KV to the dummy slab's blocks, which no text uses."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not made for the interpreter")


@pytest.mark.parametrize("family", only({"nemotron_h"}, CASES))
def test_no_program_touches_what_another_one_of_its_launch_writes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, a host step, and steps as captured; then a step of padding alone."""
    write_agreeing(tmp_path, family)
    fields = {"dtype": "float32", "adaptive": False, "max_model_len": 32, "max_running": 2, **CASES[family]}
    with SpecEngine(tmp_path, kernels="triton", graphs=True, **fields) as engine:
        loop = engine.model.loop
        with watched(monkeypatch) as races:
            engine.generate([[3, 1, 4, 1, 5], [2, 7, 1]], PARAMS)
        assert loop.runner and loop.runner.steps > 0 and engine.stats().drafted > 0
        assert races.launches.total() > 100 and races.found == {}
        step, rows = loop.runner.batch.step, loop.runner.batch.rows
        with watched(monkeypatch) as races, torch.inference_mode():
            for key in loop.runner.graph_keys():
                step(rows, key)
        assert races.found.keys() <= PADDING and Race("self_attention.triton._ready", "pages") in races.found
        dummy = range(start := loop.arena.data.data_ptr(), start + loop.arena.layout.slab_bytes)
        assert all(address in dummy for own in races.found.values() for address in own)


def test_what_is_cut_into_parts_is_put_together_by_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long weight rows and long texts, which no small model has."""
    generator = torch.Generator().manual_seed(0)
    weight_ND, x_TD = (torch.randn(n, 1030, generator=generator).bfloat16() for n in (140, 3))
    layer = make_layer(
        torch.bfloat16, gated=True, norm=None, rotated=0, lengths=(400, 5), tree=(-1, 0, 0, 1), dim=32
    )
    with watched(monkeypatch) as races:
        for weight in (weight_ND, fp8.quantise(weight_ND), INT4.quantise(weight_ND)):
            linear.linear(x_TD, linear.pack(weight))
        attention.self_attention(*layer)
    kernels = ("linear.triton._add_parts", "attention.triton._merge")
    assert all(races.launches[name] for name in kernels) and races.found == {}


@triton.jit
def _shift(x, out, apart):
    """Copy an entry from an offset: in place, this conflicts with the next program."""
    own = tl.program_id(0)
    tl.store(out + own, tl.load(x + own + apart))


@triton.jit
def _sum(x, out):
    """Add to one number from all programs."""
    tl.store(out, tl.load(out) + tl.load(x + tl.program_id(0)))


def test_races_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control; in the interpreter both kernels compute the intended result."""
    x_N, out_N = torch.arange(8.0), torch.zeros(8)
    with watched(monkeypatch) as races:
        _shift[(7,)](x_N, out_N, 1)
        _shift[(7,)](x_N, x_N, 0)
    assert races.found == {} and races.launches.total() == 2
    with watched(monkeypatch) as races:
        _shift[(7,)](x_N, x_N, 1)
        _sum[(8,)](x_N, out_N)
    shifted, summed = races.found.items()
    assert shifted[0].kernel.endswith("_shift") and shifted[0].argument == "x"
    assert shifted[1] == [x_N.data_ptr() + 4 * i for i in range(1, 7)]
    assert summed[0].kernel.endswith("_sum") and summed[0].argument == "out"
    assert summed[1] == [out_N.data_ptr()]
