"""Jamba, with experts and without."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention


def draw(rng: Random) -> PreTrainedConfig:
    own = attention(rng)
    own.pop("head_dim")
    own["hidden_size"] = own["num_attention_heads"] * rng.choice([8, 12])
    experts = rng.choice([1, 3, 5])
    return transformers.JambaConfig(
        **own,
        num_hidden_layers=rng.choice([1, 2, 3]),
        attn_layer_period=rng.choice([2, 3]),
        attn_layer_offset=rng.choice([0, 1]),
        expert_layer_period=2,
        expert_layer_offset=rng.choice([0, 1]),
        num_experts=experts,
        num_experts_per_tok=min(experts, rng.choice([1, 2, 3])),
        intermediate_size=rng.choice([10, 24]),
        mamba_d_state=rng.choice([5, 8, 16]),
        mamba_d_conv=rng.choice([2, 3, 4]),
        mamba_expand=rng.choice([1, 2]),
        mamba_dt_rank=rng.choice(["auto", 5]),
        mamba_conv_bias=rng.random() < 0.7,
        mamba_proj_bias=rng.random() < 0.5,
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.JambaConfig(
        **{name: value for name, value in common.items() if name != "head_dim"},
        num_hidden_layers=3,
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=24,
        mamba_d_state=8,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"attn_layer_offset": 3}, "attn_layer_offset", "below attn_layer_period (3)"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok", "at most num_experts (4)"),
    ({"mamba_d_state": 1}, "mamba_d_state", "at least 2"),
)
