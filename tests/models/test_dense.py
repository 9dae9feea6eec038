"""Scaled rotary frequencies and published configs of dense families, against transformers."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.errors import CheckpointError
from specdec.kernels.table import load_kernels
from specdec.models import families
from specdec.models.checkpoint import Checkpoint
from specdec.models.mixers import Attention
from specdec.models.rope import Llama3Scaling, Rope, rope_tables
from tests.models.random_checkpoints import Sample, edit_config, save
from tests.models.runner import Runner
from tests.models.test_network import relative
from tests.tolerances import LOGITS_RELATIVE

SLIDING, FULL = "sliding_attention", "full_attention"
POSITIONS, FAR = 3000, 131_072
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
SMOLLM3: dict[str, Any] = {
    "model_type": "smollm3",
    "attention_bias": False,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": [FULL] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def mixers(config: dict[str, Any]) -> list[Attention]:
    return [mixer for mixer in families.network(config).mixers() if isinstance(mixer, Attention)]


@pytest.mark.parametrize(
    "config", [LLAMA, QWEN2, MISTRAL, SMOLLM3, QWEN3_MOE], ids=lambda own: own["model_type"]
)
def test_published_configs_have_no_unread_field(config: dict[str, Any]) -> None:
    assert families.unread_fields(config) == []
    assert families.unread_fields(config | {"attn_logit_cap": 30.0}) == ["attn_logit_cap"]


def test_published_configs_are_read() -> None:
    assert mixers(LLAMA)[0].rope == Rope(64, 5e5, scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192))
    assert {(mixer.bias, mixer.out_bias, mixer.window) for mixer in mixers(QWEN2)} == {(True, False, None)}
    assert {mixer.window for mixer in mixers(MISTRAL)} == {4096}
    assert [mixer.rope is None for mixer in mixers(SMOLLM3)] == [False, False, False, True] * 9
    assert {(mixer.kv_heads, mixer.head_dim) for mixer in mixers(QWEN3_MOE)} == {(4, 128)}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("outer", [None, 4096])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 8.0},
        {"low_freq_factor": 0.7, "high_freq_factor": 2.3},
        {"original_max_position_embeddings": None},
        {"rope_theta": 1e4},
    ],
    ids=str,
)
def test_llama3_frequencies_equal_transformers_bit_for_bit(
    head_dim: int, outer: int | None, changes: dict[str, Any]
) -> None:
    """The original context length may be in either field, or default to the context length."""
    scaling = {name: value for name, value in (LLAMA["rope_scaling"] | changes).items() if value is not None}
    config = LLAMA | {"head_dim": head_dim, "rope_scaling": scaling}
    config |= {"original_max_position_embeddings": outer} if outer else {}
    module = LlamaRotaryEmbedding(transformers.LlamaConfig(**{**config, "rope_scaling": dict(scaling)}))
    (rope,) = {mixer.rope for mixer in mixers(config)}
    assert rope is not None and rope.scaling is not None
    position_T = torch.cat([torch.arange(POSITIONS), torch.arange(FAR - POSITIONS, FAR)])
    expected = [table[0, :, : head_dim // 2] for table in module(torch.zeros(1), position_T[None])]
    for name in ("cpu", "reference"):
        kernels = load_kernels(name)
        found = kernels.rope_table(position_T, rope.dim, rope.theta, rope.scaling)
        assert all(torch.equal(own, theirs) for own, theirs in zip(found, expected, strict=True))
        plain = kernels.rope_table(position_T, rope.dim, rope.theta)
        assert not torch.equal(plain[0], expected[0])
    (used,) = rope_tables([rope], POSITIONS, load_kernels("cpu"), torch.device("cpu")).values()
    assert torch.equal(used[0], expected[0][:POSITIONS])


@pytest.mark.parametrize("head_dim", [64, 10])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"type": "linear", "factor": 0.5},
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "yarn", "factor": None, "original_max_position_embeddings": 77},
        {"rope_type": "yarn", "factor": 0.5},
        {"rope_type": "yarn", "factor": 7.3, "original_max_position_embeddings": 20, "rope_theta": 12.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.3, "beta_fast": None},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.3, "mscale": 2.0, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.5, "beta_slow": 8.5},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 9.0, "beta_slow": 0.2, "truncate": False},
    ],
    ids=str,
)
def test_scaled_positions_equal_transformers_bit_for_bit(head_dim: int, scaling: dict[str, Any]) -> None:
    config = LLAMA | {"head_dim": head_dim, "rope_scaling": scaling, "max_position_embeddings": 5000}
    module = LlamaRotaryEmbedding(transformers.LlamaConfig(**{**config, "rope_scaling": dict(scaling)}))
    (rope,) = {mixer.rope for mixer in mixers(config)}
    assert rope is not None and rope.scaling is not None
    expected = [
        table[0, :, : head_dim // 2] for table in module(torch.zeros(1), torch.arange(POSITIONS)[None])
    ]
    for name in ("cpu", "reference"):
        (found,) = rope_tables([rope], POSITIONS, load_kernels(name), torch.device("cpu")).values()
        assert all(torch.equal(own, theirs) for own, theirs in zip(found, expected, strict=True))
    (plain,) = rope_tables(
        [replace(rope, scaling=None)], POSITIONS, load_kernels("cpu"), torch.device("cpu")
    ).values()
    assert not torch.equal(plain[0], expected[0])


@pytest.mark.parametrize(("maximum", "length"), [(40_960, 131_072), (200_000, 200_000)])
def test_yarn_extends_a_context_that_is_stated_as_it_was(maximum: int, length: int) -> None:
    """Qwen3's documentation leaves max_position_embeddings unchanged."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = LLAMA | {"rope_scaling": scaling, "max_position_embeddings": maximum}
    assert families.network(config).max_length == length


@pytest.mark.parametrize(
    ("change", "field", "why"),
    [
        ({"factor": 0}, "factor", "above 0"),
        (
            {"factor": None, "original_max_position_embeddings": 0},
            "original_max_position_embeddings",
            "integer",
        ),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast", "at least beta_slow"),
        ({"beta_slow": "x"}, "beta_slow", "finite number"),
        ({"attention_factor": -1.0}, "attention_factor", "above 0"),
        ({"rope_theta": 1.0}, "rope_theta", "above 1"),
        ({"truncate": 1}, "truncate", "true or false"),
        ({"mscale": float("inf")}, "mscale", "finite number"),
        ({"factor": 1e300}, "factor", "to 1e.09"),
        ({"factor": 1e8}, "factor", "a context of at most 2,147,483,647"),
        ({"beta_fast": 1e308}, "beta_fast", "to 1e.09"),
        ({"beta_slow": 1e-320}, "beta_slow", "from 1e-09"),
        ({"mscale": 1.0, "mscale_all_dim": -7.0}, "mscale_all_dim", "at least 0"),
    ],
)
def test_wrong_settings_of_yarn_are_named(change: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as wrong:
        families.network(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **change}})
    assert wrong.value.field == f"rope_scaling.{field}"


@pytest.mark.parametrize("kinds", [[SLIDING, FULL, SLIDING], [FULL, FULL, SLIDING]])
def test_mistral_with_layer_types_equals_transformers(kinds: list[str], tmp_path: Path) -> None:
    """AutoConfig reads such a file as Ministral, in which layers of both kinds may alternate."""
    config = transformers.MinistralConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=33,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.15,
        max_position_embeddings=512,
        sliding_window=5,
        layer_types=kinds,
    )
    save(Sample("mistral", 1, config, False, fused=True, sharded=False, multimodal=False), tmp_path)
    tokens = [Random(1).randrange(61) for _ in range(40)]
    found = []
    for name in ("ministral", "mistral"):
        edit_config(tmp_path, model_type=name)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        with torch.inference_mode():
            expected_TV = model(torch.tensor([tokens]), use_cache=False).logits[0]
        found.append(families.network(Checkpoint(tmp_path).config))
        assert relative(Runner(tmp_path, torch.float32).read(tokens, 7), expected_TV) < LOGITS_RELATIVE
    assert found[0] == found[1]
    assert [mixer.window for mixer in found[0].mixers()] == [5 if kind == SLIDING else None for kind in kinds]
