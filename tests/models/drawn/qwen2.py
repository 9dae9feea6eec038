"""Qwen2, in which layers after the first few may slide."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, rope

SLIDING, FULL = KINDS = ("sliding_attention", "full_attention")


def draw(rng: Random) -> PreTrainedConfig:
    layers = rng.choice([1, 2, 3])
    return transformers.Qwen2Config(
        **attention(rng),
        **rope(rng),
        num_hidden_layers=layers,
        intermediate_size=rng.choice([20, 33]),
        **rng.choice(
            [
                {},
                {"use_sliding_window": True, "max_window_layers": rng.choice([0, 1, 2])},
                {"use_sliding_window": True, "layer_types": [rng.choice(KINDS) for _ in range(layers)]},
            ]
        ),
        sliding_window=rng.choice([1, 5, 17, 500]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.Qwen2Config(
        **common,
        num_hidden_layers=2,
        intermediate_size=24,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"use_sliding_window": False}, "layer_types", "not sliding_attention"),
    ({"sliding_window": None}, "layer_types", "not sliding_attention"),
    ({"sliding_window": 0}, "sliding_window", "at least 1"),
    ({"layer_types": None, "max_window_layers": -1}, "max_window_layers", "at least 0"),
    ({"attention_bias": False}, "attention_bias", "True"),
    ({"mlp_bias": True}, "mlp_bias", "without biases"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_parameters.rope_type", "'llama3'"),
)
