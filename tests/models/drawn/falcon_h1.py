"""Falcon-H1."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, mamba, rope


def draw(rng: Random) -> PreTrainedConfig:
    def some() -> float:
        return rng.choice([1.0, 0.4, 0.7, 1.25])

    fields, own = attention(rng), mamba(rng)
    own["mamba_d_ssm"] = rng.choice([None, own["mamba_n_heads"] * rng.choice([4, 7])])
    return transformers.FalconH1Config(
        **fields,
        **own,
        **rope(rng),
        num_hidden_layers=rng.choice([1, 2, 3]),
        intermediate_size=rng.choice([20, 33]),
        attention_bias=rng.random() < 0.3,
        mlp_bias=rng.random() < 0.3,
        projectors_bias=rng.random() < 0.5,
        mamba_rms_norm=rng.random() < 0.6,
        mamba_norm_before_gate=rng.random() < 0.5,
        embedding_multiplier=rng.choice([1.0, 5.6]),
        lm_head_multiplier=rng.choice([1.0, 0.3]),
        key_multiplier=some(),
        attention_in_multiplier=some(),
        attention_out_multiplier=some(),
        ssm_in_multiplier=some(),
        ssm_out_multiplier=some(),
        ssm_multipliers=[some() for _ in range(5)],
        mlp_multipliers=[some(), some()],
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.FalconH1Config(
        **common,
        num_hidden_layers=2,
        intermediate_size=24,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_chunk_size=16,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        key_multiplier=0.5,
        ssm_in_multiplier=1.25,
        ssm_multipliers=[0.7, 1.1, 0.9, 1.2, 0.8],
        mlp_multipliers=[0.9, 0.6],
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"ssm_multipliers": [1.0, 1.0]}, "ssm_multipliers", "list of 5 finite numbers"),
    ({"mlp_multipliers": 1.0}, "mlp_multipliers", "list of 2 finite numbers"),
    ({"mamba_d_ssm": 33}, "mamba_n_heads", "width of x (33)"),
    ({"lm_head_multiplier": "1"}, "lm_head_multiplier", "finite number"),
)
