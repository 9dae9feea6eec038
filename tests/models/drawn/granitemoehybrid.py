"""Granite 4, dense and with experts."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, mamba, rope

KINDS = ("linear_attention", "full_attention")


def draw(rng: Random) -> PreTrainedConfig:
    experts, layers = rng.choice([0, 3, 5]), rng.choice([1, 2, 3])
    return transformers.GraniteMoeHybridConfig(
        **attention(rng),
        **mamba(rng),
        **rope(rng),
        num_hidden_layers=layers,
        layer_types=[rng.choice(KINDS) for _ in range(layers)],
        attention_bias=rng.random() < 0.3,
        num_local_experts=experts,
        num_experts_per_tok=min(experts, rng.choice([1, 2, 3])),
        intermediate_size=rng.choice([6, 16]),
        shared_intermediate_size=rng.choice([10, 24]),
        position_embedding_type=rng.choice([None, None, "rope"]),
        embedding_multiplier=rng.choice([1.0, 12.0]),
        residual_multiplier=rng.choice([0.22, 1.0]),
        attention_multiplier=rng.choice([0.25, 0.09]),
        logits_scaling=rng.choice([1.0, 6.0, 8.0]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.GraniteMoeHybridConfig(
        **common,
        num_hidden_layers=3,
        layer_types=[KINDS[0], KINDS[1], KINDS[0]],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_chunk_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=8,
        shared_intermediate_size=24,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
        logits_scaling=0.5,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"mamba_d_head": 7}, "mamba_n_heads", "width of x (64)"),
    ({"mamba_n_groups": 3}, "mamba_n_heads", "multiple of mamba_n_groups (3)"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type", "'rope'"),
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"logits_scaling": 0}, "logits_scaling", "other than 0"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok", "at most num_local_experts (4)"),
    ({"time_step_limit": [1.0, 0.5]}, "time_step_limit", "smaller one first"),
    ({"residual_multiplier": "0.22"}, "residual_multiplier", "finite number"),
)
