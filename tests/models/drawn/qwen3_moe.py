"""Qwen3 with experts."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, rope


def draw(rng: Random) -> PreTrainedConfig:
    experts = rng.choice([0, 2, 5, 8])
    return transformers.Qwen3MoeConfig(
        **attention(rng),
        **rope(rng),
        num_hidden_layers=rng.choice([1, 2, 3]),
        intermediate_size=rng.choice([20, 33]),
        attention_bias=rng.random() < 0.3,
        num_experts=experts,
        num_experts_per_tok=min(experts, rng.choice([1, 2, 3])),
        moe_intermediate_size=rng.choice([6, 16]),
        norm_topk_prob=rng.random() < 0.7,
        decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.choice([None, [], [0]]),
        use_sliding_window=rng.random() < 0.4,
        sliding_window=rng.choice([1, 5, 17, 500]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.Qwen3MoeConfig(
        **common,
        num_hidden_layers=2,
        intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        norm_topk_prob=True,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok", "at most num_local_experts (4)"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step", "at least 1"),
    ({"norm_topk_prob": 1}, "norm_topk_prob", "true or false"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "not sliding_attention"),
    ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window", "at least 1"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_parameters.rope_type", "'llama3'"),
)
