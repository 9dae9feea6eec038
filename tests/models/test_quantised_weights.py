"""Loss of the bundled model with integer weights on held-out text, and how such weights are loaded."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import EngineConfig, SamplingParams, SpecEngine
from specdec.kernels.linear import fp8
from specdec.kernels.linear.integers import INT4, INT8, Integers, Rounding
from specdec.kernels.linear.matrix import widen
from specdec.models.weights import RandomWeights
from specdec.setup.footprint import describe_model
from tests.selection import EXHAUSTIVE
from tools.train_tiny.corpus import collect, split

LOST = {None: 0.0, "int8": 0.001, "int4": 0.02}
"""Maximum loss per token above that of bfloat16."""
TOKENS, PIECE = 10_000, 500


@pytest.fixture(scope="module")
def pieces() -> list[list[int]]:
    """Cut the first held-out files."""
    _, held_out = split(collect())
    with SpecEngine("tiny", draft="none") as engine:
        assert engine.model.tokenizer is not None
        found: list[list[int]] = []
        for document in held_out:
            ids = engine.model.tokenizer.encode(document.text)
            found += [list(ids[at : at + PIECE]) for at in range(0, len(ids) - PIECE, 4 * PIECE)]
            if sum(map(len, found)) > TOKENS:
                break
    return found


def judge(pieces: Sequence[Sequence[int]], quantize: str | None) -> tuple[float, list[int]]:
    """Return the loss per token, and the most likely token at each position."""
    with SpecEngine("tiny", draft="none", dtype="bfloat16", quantize=quantize, prefix_cache=False) as engine:
        done = engine.generate(pieces, SamplingParams(max_tokens=0, prompt_logprobs=1))
    entries = [entry for own in done for entry in (own.prompt_logprobs or ()) if entry is not None]
    return -sum(own.logprob for own in entries) / len(entries), [own.top[0][0] for own in entries]


@EXHAUSTIVE
def test_little_is_lost(pieces: list[list[int]]) -> None:
    exact, plain = judge(pieces, None)
    for quantize, most in LOST.items():
        loss, best = judge(pieces, quantize)
        share = sum(a == b for a, b in zip(best, plain, strict=True)) / len(plain)
        print(f"{quantize}: loss {loss:.4f} ({loss - exact:+.4f}), the same likeliest token {share:.1%}")
        assert loss - exact <= most


@pytest.mark.parametrize(("form", "bits"), [(INT8, 8), (INT4, 4)])
def test_matrices_are_rounded_as_they_are_drawn_and_logits_to_eight_bits(form: Rounding, bits: int) -> None:
    weights = RandomWeights(0, torch.bfloat16, quantize=form)
    matrix = weights.matrix("layers.0.ffn.up.weight", (96, 64))
    output = weights.output("head.weight", weights.take("head.weight", (50, 64)))
    assert isinstance(matrix, Integers) and isinstance(output, Integers)
    assert (matrix.bits, output.bits) == (bits, 8)
    assert isinstance(weights.take("layers.0.ffn.router.weight", (8, 64)), torch.Tensor)


@pytest.mark.parametrize("form", [INT8, INT4])
@pytest.mark.parametrize("shape", [(130, 200), (3, 130, 200)])
def test_fp8_weights_are_requantised(form: Rounding, shape: tuple[int, ...]) -> None:
    stored = fp8.quantise(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    again = form.quantise(widen(stored, torch.float32))
    found = form.quantise(stored)
    assert torch.equal(found.number_ND, again.number_ND) and torch.equal(found.scale, again.scale)


@pytest.mark.parametrize(("quantize", "most"), [("int8", 0.75), ("int4", 0.65)])
def test_quantised_weights_read_and_report_fewer_bytes(
    checkpoint: Callable[..., Path], quantize: str, most: float
) -> None:
    folder = checkpoint(hidden_size=256)
    told: list[dict[str, Any]] = [
        describe_model(folder, EngineConfig(dtype="bfloat16", device="cpu", quantize=own), [16])
        for own in (None, quantize)
    ]
    assert told[1]["read_bytes_per_token"] < most * told[0]["read_bytes_per_token"]
