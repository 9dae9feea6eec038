"""A whole step of Triton kernels, as captured on a GPU, in the interpreter: matches plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec import SamplingParams, SpecEngine
from tests.selection import EXHAUSTIVE, only

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, top_k=20, seed=5, ignore_eos=True),
]
TREE = {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_5": {**TREE, "slots": "record"},
    "qwen3_5_moe": {"num_steps": 2, "topk": 1, "slots": "snapshot"},
    "nemotron_h": {**TREE, "slots": "record"},
}


@pytest.mark.parametrize("family", only({"nemotron_h"}, CASES))
def test_a_step_of_triton_kernels_says_what_torch_says(
    family: str, family_folder: Callable[..., Path]
) -> None:
    folder = family_folder(family)
    said = {}
    for kernels in ("cpu", "triton"):
        fields = {"draft": "mtp", "adaptive": False, "max_model_len": 32, **CASES[family]}
        with SpecEngine(folder, dtype="float32", kernels=kernels, graphs=True, **fields) as engine:
            said[kernels] = [c.token_ids for c in engine.generate(PROMPTS, PARAMS)]
            runner = engine.model.loop.runner
            assert runner is not None and runner.steps > 1
            assert engine.stats().drafted > 0
    assert said["triton"] == said["cpu"]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@EXHAUSTIVE
def test_whole_numbers_say_what_their_dequantised_weights_say(
    quantize: str, family_folder: Callable[..., Path]
) -> None:
    """The reference has no drafts, and multiplies by dequantized weights in float32."""
    fields = {"dtype": "float32", "quantize": quantize, "adaptive": False, "max_model_len": 32}
    drafts = {"draft": "mtp", **CASES["qwen3_5_moe"]}
    said = {}
    for kernels, own in (("reference", {"draft": "none"}), ("triton", drafts)):
        folder = family_folder("qwen3_5_moe")
        with SpecEngine(folder, kernels=kernels, graphs=kernels == "triton", **fields, **own) as engine:
            assert engine.model.settings.weights == quantize
            said[kernels] = [c.token_ids for c in engine.generate(PROMPTS, PARAMS)]
            assert (engine.stats().drafted > 0) == (own is drafts)
    assert said["triton"] == said["reference"]


@pytest.mark.parametrize(("draft", "steps"), [("eagle", 1), ("block", 3)])
def test_a_head_that_looks_back_in_part_drafts_as_in_torch(
    family_folder: Callable[..., Path], draft: str, steps: int
) -> None:
    """The kernels get the window's start; earlier blocks are not in its tables.

    With a single row, the row's start must apply to each of its nodes.
    """
    folder = family_folder("qwen3")
    made = {}
    for kernels in ("cpu", "triton"):
        shape = {"num_steps": steps, "topk": 3, "num_draft_tokens": 4}
        fields = {"draft": draft, "draft_window": 5, "adaptive": False, "max_model_len": 48, **shape}
        with SpecEngine(folder, dtype="float32", kernels=kernels, graphs=True, **fields) as engine:
            params = SamplingParams(max_tokens=4, temperature=0.8, seed=5, ignore_eos=True)
            text = engine.generate([list(range(24))], params)[0].token_ids
            made[kernels] = text, engine.stats().drafted, engine.stats().accepted
            runner = engine.model.loop.runner
            assert runner is not None and runner.steps > 1
    assert made["triton"] == made["cpu"]
