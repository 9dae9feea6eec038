"""Estimated memory and traffic of a model against a model that was built."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.config.engine import EngineConfig
from specdec.models.families import network
from specdec.models.shapes import SHAPES
from specdec.setup.footprint import ARITHMETIC, describe_model, measure, token_work

MIXTURE = {
    **SHAPES["qwen3.5-35b-a3b"],
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "vocab_size": 65,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "mtp_num_hidden_layers": 0,
}
EXPERT_BYTES = 4 * 8 * (3 * 16 * 32) * 4
"""Layers, experts, weights of an expert, float32."""


@pytest.mark.parametrize("name", ["tiny", "0.5b", "qwen3-next-80b-a3b", "nemotron-h-8b", "zamba2-1.2b"])
def test_parameters_are_counted_as_transformers_counts_them(name: str) -> None:
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]))
    counted = measure(network(SHAPES[name]), torch.bfloat16)
    assert counted.parameters == sum(p.numel() for p in built.parameters())


def test_shapes_need_no_compiler_of_torch() -> None:
    script = (
        "import sys, torch\n"
        "from specdec.models.families import network\n"
        "from specdec.models.shapes import SHAPES\n"
        "from specdec.setup.footprint import measure\n"
        "for fields in SHAPES.values():\n"
        "    measure(network(fields), torch.bfloat16, copied=True)\n"
        "print(*sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "\n"


def test_multi_token_head_is_counted_apart() -> None:
    with_head, without = (
        measure(network({**MIXTURE, "mtp_num_hidden_layers": layers}), torch.float32) for layers in (1, 0)
    )
    assert with_head.parameters == without.parameters
    assert with_head.mtp_parameters > 0
    assert without.mtp_parameters == 0


def test_step_reads_the_experts_that_its_tokens_choose() -> None:
    counted = measure(network(MIXTURE), torch.float32)
    every = counted.step_bytes(10_000)
    embedding = 65 * 32 * 4
    assert every == pytest.approx(counted.weight_bytes - embedding)
    assert every - counted.step_bytes(1) == pytest.approx(EXPERT_BYTES * (1 - 2 / 8))
    assert every - counted.step_bytes(2) == pytest.approx(EXPERT_BYTES * (1 - 2 / 8) ** 2)


def test_a_tied_embedding_is_read_by_the_head() -> None:
    tied = measure(network({**MIXTURE, "tie_word_embeddings": True}), torch.float32)
    assert tied.step_bytes(10_000) == pytest.approx(tied.weight_bytes)


def test_description_of_a_hybrid(hybrid: Path) -> None:
    described: dict[str, Any] = describe_model(
        hybrid, EngineConfig(device="cpu", dtype="float32", memory_bytes=1 << 20), [16, 512]
    )
    assert described["layers"] == {"gated delta net": 3, "dense feed-forward": 4, "attention": 1}
    assert described["kv_bytes_per_token"] == 2 * 2 * 16 * 4
    # Per recurrent layer: a float32 state [4, 8, 16] and three inputs of 2·2·8 + 4·16 channels.
    assert described["state_bytes"] == pytest.approx(3 * 4 * (4 * 8 * 16 + 3 * 96), rel=0.05)
    assert described["slab_bytes"] >= described["state_bytes"]
    assert 0 < described["record_share"] < 1
    short, long = described["sequences"].values()
    assert short > long > 0 and described["heads"] == "none"
    assert long * (described["state_bytes"] + 512 * described["kv_bytes_per_token"]) <= 1 << 20


def test_description_equals_the_engines_settings(hybrid: Path) -> None:
    def describe(*lengths: int, **fields: Any) -> dict[str, Any]:
        return describe_model(hybrid, EngineConfig.of(None, {"memory_bytes": 1 << 22, **fields}), lengths)

    described = describe(64, 512, 513, 8192, max_running=9)
    assert list(described["sequences"]) == ["64 tokens", "512 tokens"]
    assert (described["max_model_len"], described["max_running"]) == (512, 9)
    assert list(describe(1024, max_model_len=100)["sequences"]) == ["100 tokens"]
    assert described["draft_slot"] == "record" and described["record_share"] > 0
    snapshot, plain = describe(64, slots="snapshot"), describe(64, draft="none")
    assert snapshot["draft_slot"] == "snapshot" and not {"record_bytes", "record_share"} & set(snapshot)
    assert plain["draft"] == "none" and not {"draft_slot", "record_bytes", "record_share"} & set(plain)
    copied = describe(64, draft="self-int4", dtype="bfloat16")
    assert 0 < copied["copy_bytes"] < copied["weight_bytes"] / 2 and "copy_bytes" not in described


def test_a_steps_work_grows_as_the_experts_that_its_tokens_meet() -> None:
    """In addition to each token's arithmetic; without experts work is proportional to tokens."""
    spec = network(MIXTURE)
    work, counted = token_work(spec), measure(spec, torch.float32)
    read = [counted.step_bytes(tokens) - counted.step_bytes(0) for tokens in (1, 2, 9, 100)]
    for tokens, own in zip((1, 2, 9, 100), read, strict=True):
        expected = ARITHMETIC * tokens + (1 - ARITHMETIC) * own / read[0]
        assert work(tokens) == pytest.approx(expected)
    dense = token_work(network(SHAPES["tiny"]))
    assert [dense(tokens) for tokens in (0, 1, 7, 300)] == [0, 1, 7, 300]


def test_a_rank_has_its_share(hybrid: Path) -> None:
    whole, rank = (describe_model(hybrid, EngineConfig(device="cpu", tp=tp), [64]) for tp in (1, 2))
    assert rank["tp"] == 2 and "tp" not in whole
    assert rank["parameters"] == whole["parameters"] > rank["rank_parameters"]
    assert 2 * rank["state_bytes"] == whole["state_bytes"]
    assert 2 * rank["kv_bytes_per_token"] == whole["kv_bytes_per_token"]
    # The tied embedding and the norms are on every rank.
    embedding = 320 * 48 * 4
    divided = whole["weight_bytes"] - embedding
    assert divided < 2 * (rank["weight_bytes"] - embedding) < 1.05 * divided
