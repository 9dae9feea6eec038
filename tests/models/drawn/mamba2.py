"""Mamba-2 and Codestral-Mamba: no attention."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig


def draw(rng: Random) -> PreTrainedConfig:
    groups, head_dim = rng.choice([1, 2]), rng.choice([4, 8])
    heads = groups * rng.choice([1, 3, 5])
    return transformers.Mamba2Config(
        vocab_size=rng.choice([61, 96, 131]),
        hidden_size=heads * head_dim // 2,
        num_hidden_layers=rng.choice([1, 2, 3]),
        num_heads=heads,
        head_dim=head_dim,
        n_groups=groups,
        state_size=rng.choice([5, 8, 16]),
        conv_kernel=rng.choice([2, 3, 4]),
        use_bias=rng.random() < 0.5,
        use_conv_bias=rng.random() < 0.7,
        residual_in_fp32=rng.random() < 0.5,
        time_step_limit=rng.choice([(0.0, float("inf")), (0.01, 0.5)]),
        chunk_size=rng.choice([4, 16]),
        initializer_range=0.15,
        tie_word_embeddings=rng.random() < 0.5,
        eos_token_id=rng.choice([None, 7, [5, 9]]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    attends = ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    return transformers.Mamba2Config(
        **{name: value for name, value in common.items() if name not in attends},
        num_hidden_layers=3,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        state_size=8,
        chunk_size=16,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"num_heads": 9}, "num_heads", "multiple of n_groups (2)"),
    ({"expand": 3}, "num_heads", "expand times hidden_size (96)"),
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg", "transformers"),
)
