"""OLMo-Hybrid."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention

KINDS = ("linear_attention", "full_attention")


def draw(rng: Random) -> PreTrainedConfig:
    key_heads, layers = rng.choice([1, 2, 3]), rng.choice([2, 3])
    kinds = [*KINDS, *(rng.choice(KINDS) for _ in range(layers - 2))]
    rng.shuffle(kinds)
    return transformers.OlmoHybridConfig(
        **attention(rng),
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([None, None, 1e4])},
        num_hidden_layers=layers,
        layer_types=kinds,
        attention_bias=rng.random() < 0.3,
        intermediate_size=rng.choice([20, 33]),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * rng.choice([1, 2]),
        linear_key_head_dim=rng.choice([4, 7, 12]),
        linear_value_head_dim=rng.choice([4, 9, 16]),
        linear_conv_kernel_dim=rng.choice([2, 3, 4]),
        linear_allow_neg_eigval=rng.random() < 0.7,
        pad_token_id=None,
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.OlmoHybridConfig(
        **common,
        num_hidden_layers=3,
        layer_types=[KINDS[0], KINDS[1], KINDS[0]],
        rope_parameters={"rope_type": "default", "rope_theta": None},
        intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"rope_parameters": None}, "rope_parameters", "null: none"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads", "multiple of linear_num_key_heads (2)"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types", "not sliding_attention"),
    ({"linear_allow_neg_eigval": "yes"}, "linear_allow_neg_eigval", "true or false"),
)
