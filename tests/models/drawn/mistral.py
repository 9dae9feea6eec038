"""Mistral; its layers all slide, or none does."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, llama3


def draw(rng: Random) -> PreTrainedConfig:
    return transformers.MistralConfig(
        **attention(rng),
        **llama3(rng),
        num_hidden_layers=rng.choice([1, 2, 3]),
        intermediate_size=rng.choice([20, 33]),
        sliding_window=rng.choice([None, 1, 5, 17, 500]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.MistralConfig(**common, num_hidden_layers=2, intermediate_size=24, sliding_window=7)


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"sliding_window": 0}, "sliding_window", "at least 1"),
    ({"use_sliding_window": False}, "use_sliding_window", "True"),
    (
        {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
        "sliding_window",
        "at least 1",
    ),
    ({"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types", "not chunked_attention"),
    ({"attention_bias": True}, "attention_bias", "without biases"),
    ({"mlp_bias": True}, "mlp_bias", "without biases"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_parameters.rope_type", "'llama3'"),
)
