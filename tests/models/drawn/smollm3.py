"""SmolLM3, in which some layers have no positions."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, rope

SLIDING, FULL = KINDS = ("sliding_attention", "full_attention")


def draw(rng: Random) -> PreTrainedConfig:
    layers = rng.choice([1, 2, 3])
    return transformers.SmolLM3Config(
        **attention(rng),
        **rope(rng),
        pad_token_id=None,
        num_hidden_layers=layers,
        intermediate_size=rng.choice([20, 33]),
        attention_bias=rng.random() < 0.3,
        mlp_bias=rng.random() < 0.3,
        no_rope_layers=rng.choice([None, [rng.randrange(2) for _ in range(layers + rng.randrange(2))]]),
        no_rope_layer_interval=rng.choice([1, 2, 3]),
        use_sliding_window=rng.random() < 0.6,
        sliding_window=rng.choice([1, 5, 17, 500]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.SmolLM3Config(
        **common, num_hidden_layers=3, intermediate_size=24, no_rope_layers=[1, 0, 1]
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers", "each of 3 layers"),
    ({"no_rope_layers": [1, 0, 2]}, "no_rope_layers", "1 (with positions) or 0"),
    ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval", "at least 1"),
    ({"layer_types": [FULL, SLIDING, FULL]}, "layer_types", "not sliding_attention"),
    ({"use_sliding_window": True, "layer_types": [FULL, SLIDING, FULL]}, "layer_types", "not sliding"),
    ({"use_sliding_window": True, "layer_types": None, "sliding_window": 0}, "sliding_window", "at least 1"),
    ({"attention_bias": 0}, "attention_bias", "true or false"),
    ({"mlp_bias": 1}, "mlp_bias", "true or false"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_parameters.rope_type", "'llama3'"),
)
