"""Bamba."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, mamba, rope


def draw(rng: Random) -> PreTrainedConfig:
    layers = rng.choice([1, 2, 3])
    return transformers.BambaConfig(
        **attention(rng),
        **mamba(rng),
        **rope(rng),
        num_hidden_layers=layers,
        attn_layer_indices=[i for i in range(layers) if rng.random() < 0.5],
        attention_bias=rng.random() < 0.3,
        mlp_bias=rng.random() < 0.3,
        intermediate_size=rng.choice([20, 33]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.BambaConfig(
        **common,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        intermediate_size=24,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_chunk_size=16,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"attn_layer_indices": [3]}, "attn_layer_indices", "from 0 to 2"),
    ({"head_dim": 6, "rope_parameters": {}}, "rope_parameters.partial_rotary_factor", "a head of 6"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type", "default"),
    ({"mamba_d_conv": 0}, "mamba_d_conv", "at least 1"),
)
