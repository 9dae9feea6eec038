"""Mamba and Falcon-Mamba: no attention."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig


def draw(rng: Random) -> PreTrainedConfig:
    kind = rng.choice([transformers.MambaConfig, transformers.FalconMambaConfig])
    return kind(
        vocab_size=rng.choice([61, 96, 131]),
        hidden_size=rng.choice([24, 33, 40]),
        expand=rng.choice([1, 2]),
        num_hidden_layers=rng.choice([1, 2, 3]),
        state_size=rng.choice([5, 8, 16]),
        time_step_rank=rng.choice(["auto", 5]),
        conv_kernel=rng.choice([2, 3, 4]),
        use_bias=rng.random() < 0.5,
        use_conv_bias=rng.random() < 0.7,
        residual_in_fp32=rng.random() < 0.5,
        initializer_range=0.15,
        tie_word_embeddings=rng.random() < 0.5,
        eos_token_id=rng.choice([None, 7, [5, 9]]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    attends = ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    return transformers.FalconMambaConfig(
        **{name: value for name, value in common.items() if name not in attends},
        num_hidden_layers=3,
        state_size=8,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg", "transformers"),
    ({"time_step_rank": 0}, "time_step_rank", "at least 1"),
)
