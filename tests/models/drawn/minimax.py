"""MiniMax-Text-01 and M1, with transformers' field names and the published ones."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, rope

KINDS = ("linear_attention", "full_attention")


def draw(rng: Random) -> PreTrainedConfig:
    """Draw a model with at least one attention layer: transformers counts its cached tokens there."""
    layers, experts = rng.choice([1, 2, 3, 4]), rng.choice([2, 3, 5])
    kinds = [KINDS[1], *(rng.choice([KINDS[0], *KINDS]) for _ in range(layers - 1))]
    rng.shuffle(kinds)
    factors = {
        f"{half}_{own}_factor": rng.choice([1, 0.6, 1.3, 3.5])
        for half in ("full_attn", "linear_attn", "mlp")
        for own in ("alpha", "beta")
    }
    return transformers.MiniMaxConfig(
        **attention(rng),
        **rope(rng),
        **factors,
        num_hidden_layers=layers,
        layer_types=kinds,
        block_size=rng.choice([5, 16, 256]),
        intermediate_size=rng.choice([6, 16]),
        num_local_experts=experts,
        num_experts_per_tok=rng.choice([1, 2]),
        sliding_window=rng.choice([None, None, 5, 40]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.MiniMaxConfig(
        **common,
        num_hidden_layers=3,
        layer_types=[KINDS[0], KINDS[0], KINDS[1]],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        linear_attn_alpha_factor=1.2,
        mlp_alpha_factor=1.3,
        block_size=8,
        intermediate_size=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"postnorm": False}, "postnorm", "True"),
    ({"shared_intermediate_size": 8}, "shared_intermediate_size", "0"),
    ({"sliding_window": 0}, "sliding_window", "at least 1"),
    ({"attention_bias": True}, "attention_bias", "without biases"),
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "rotary_dim to say what is rotated"),
    ({"rotary_dim": 10}, "rotary_dim", "at most the width of a head (8)"),
    ({"layer_types": None, "attn_type_list": [0, 1]}, "attn_type_list", "num_hidden_layers (3)"),
    ({"layer_types": None, "attn_type_list": [0, 2, 1]}, "attn_type_list", "zeros and ones"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok", "at most num_local_experts (4)"),
    ({"mlp_alpha_factor": "1"}, "mlp_alpha_factor", "a finite number"),
)
