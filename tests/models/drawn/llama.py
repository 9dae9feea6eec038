"""Llama."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, llama3

SCALED: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def draw(rng: Random) -> PreTrainedConfig:
    return transformers.LlamaConfig(
        **attention(rng),
        **llama3(rng),
        num_hidden_layers=rng.choice([1, 2, 3]),
        intermediate_size=rng.choice([20, 33]),
        attention_bias=rng.random() < 0.3,
        mlp_bias=rng.random() < 0.3,
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.LlamaConfig(
        **common, num_hidden_layers=2, intermediate_size=24, rope_parameters=dict(SCALED)
    )


def _rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**SCALED, **changes}}


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"sliding_window": 5}, "sliding_window", "full attention"),
    ({"use_sliding_window": True}, "use_sliding_window", "full attention"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "not sliding_attention"),
    ({"attention_bias": "all"}, "attention_bias", "true or false"),
    ({"mlp_bias": 1}, "mlp_bias", "true or false"),
    ({"num_key_value_heads": 3}, "num_attention_heads", "multiple of num_key_value_heads (3)"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "rotates whole heads"),
    (_rope(rope_type="dynamic"), "rope_parameters.rope_type", "'default' or 'mrope' or 'llama3'"),
    (_rope(factor=0), "rope_parameters.factor", "above 0"),
    (_rope(factor=None), "rope_parameters.factor", "finite number"),
    (_rope(high_freq_factor=1), "rope_parameters.high_freq_factor", "above low_freq_factor (1)"),
    (
        _rope(original_max_position_embeddings=0),
        "rope_parameters.original_max_position_embeddings",
        "at least 1",
    ),
    ({"original_max_position_embeddings": "8k"}, "original_max_position_embeddings", "an integer"),
)
