"""LFM2."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, rope

KINDS = ("conv", "full_attention")


def mixers(rng: Random) -> dict[str, Any]:
    """Draw layer kinds and the sizes of both; at least one layer attends, for transformers' caches."""
    layers = rng.choice([1, 2, 3, 4])
    kinds = [KINDS[1], *(rng.choice([KINDS[0], *KINDS]) for _ in range(layers - 1))]
    rng.shuffle(kinds)
    return {
        **attention(rng),
        **rope(rng),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "conv_L_cache": rng.choice([2, 3, 3, 4, 7]),
        "conv_bias": rng.random() < 0.5,
    }


def draw(rng: Random) -> PreTrainedConfig:
    own, adjusted = mixers(rng), rng.random() < 0.6
    own["layer_types"][rng.randrange(len(own["layer_types"]))] = KINDS[0]
    return transformers.Lfm2Config(
        **own,
        intermediate_size=rng.choice([20, 33]),
        block_auto_adjust_ff_dim=adjusted,
        block_ffn_dim_multiplier=rng.choice([1.0, 0.7, 1.3]),
        block_multiple_of=rng.choice([1, 6, 16]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.Lfm2Config(
        **common,
        num_hidden_layers=3,
        layer_types=[KINDS[0], KINDS[1], KINDS[0]],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        intermediate_size=36,
        block_multiple_of=8,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types", "not linear_attention"),
    ({"layer_types": None, "full_attn_idxs": [3]}, "full_attn_idxs", "from 0 to 2"),
    ({"conv_dim": 64}, "conv_dim", "32"),
    ({"block_use_swiglu": False}, "block_use_swiglu", "True"),
    ({"use_pos_enc": False}, "use_pos_enc", "True"),
    ({"conv_L_cache": 0}, "conv_L_cache", "at least 1"),
    ({"attention_bias": True}, "attention_bias", "without biases"),
    ({"intermediate_size": 1, "block_ffn_dim_multiplier": None}, "intermediate_size", "left"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type", "default"),
)
