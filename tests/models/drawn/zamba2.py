"""Zamba2.

transformers shares blocks only if the output head is tied: untied models here share none.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import rope


def draw(rng: Random) -> PreTrainedConfig:
    kinds = [rng.choice(["mamba", "hybrid", "hybrid"]) for _ in range(rng.choice([1, 4, 6]))]
    blocks, adapts = rng.choice([1, 2, 3]), rng.random() < 0.5
    heads = rng.choice([2, 4])
    groups = rng.choice([1, 2])
    return transformers.Zamba2Config(
        **rope(rng),
        vocab_size=rng.choice([61, 96, 131]),
        hidden_size=rng.choice([24, 36, 48]),
        num_hidden_layers=len(kinds),
        layers_block_type=kinds,
        num_mem_blocks=blocks,
        num_attention_heads=heads,
        num_key_value_heads=None if adapts else rng.choice([1, 2]),
        intermediate_size=rng.choice([20, 33, None]),
        use_mem_rope=rng.random() < 0.5,
        use_shared_attention_adapter=adapts,
        adapter_rank=rng.choice([1, 3, 4]),
        add_bias_linear=rng.random() < 0.5,
        mamba_expand=rng.choice([1, 2]),
        n_mamba_heads=groups * rng.choice([2, 6]),
        mamba_ngroups=groups,
        mamba_d_state=rng.choice([5, 8, 16]),
        mamba_d_conv=rng.choice([2, 3, 4]),
        time_step_min=rng.choice([1e-3, 0.05]),
        chunk_size=rng.choice([4, 16]),
        rms_norm_eps=rng.choice([1e-5, 1e-2]),
        initializer_range=0.15,
        max_position_embeddings=512,
        tie_word_embeddings=kinds.count("hybrid") > blocks or rng.random() < 0.5,
        eos_token_id=rng.choice([None, 7, [5, 9]]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.Zamba2Config(
        **{name: value for name, value in common.items() if name != "head_dim"}
        | {"tie_word_embeddings": True},
        num_hidden_layers=5,
        layers_block_type=["hybrid", "mamba", "hybrid", "hybrid", "mamba"],
        num_mem_blocks=2,
        intermediate_size=24,
        use_mem_rope=True,
        adapter_rank=4,
        n_mamba_heads=4,
        mamba_d_state=8,
        mamba_ngroups=2,
        chunk_size=16,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"use_long_context": True}, "use_long_context", "first 4096 tokens"),
    ({"hidden_act": "silu"}, "hidden_act", "'gelu'"),
    ({"layers_block_type": ["hybrid", "attention"]}, "layer_types", "linear_attention and hybrid"),
    ({"layers_block_type": None}, "layers_block_type", "each of the 5 layers"),
    ({"num_mem_blocks": 0}, "num_mem_blocks", "at least 1"),
    ({"attention_hidden_size": 33}, "attention_hidden_size", "64"),
    ({"use_shared_attention_adapter": True, "num_key_value_heads": 1}, "num_key_value_heads", "(64)"),
    ({"n_mamba_heads": 3}, "n_mamba_heads", "mamba_ngroups (2)"),
    ({"n_mamba_heads": 6}, "n_mamba_heads", "width of x (64)"),
)
