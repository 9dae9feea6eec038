"""First-generation Zamba. transformers shares its block only if the output head is tied."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention


def draw(rng: Random) -> PreTrainedConfig:
    own = attention(rng)
    own.pop("head_dim")
    own["num_attention_heads"] = own["num_key_value_heads"] * 2
    kinds = [rng.choice(["mamba", "hybrid"]) for _ in range(rng.choice([1, 3]))]
    layers = rng.choice([None, kinds])
    own["tie_word_embeddings"] = layers is None or layers.count("hybrid") != 1
    return transformers.ZambaConfig(
        **own,
        num_hidden_layers=len(layers or range(5)),
        layers_block_type=layers,
        attn_layer_period=rng.choice([2, 3]),
        attn_layer_offset=rng.choice([0, 1]),
        intermediate_size=rng.choice([20, 33]),
        n_mamba_heads=rng.choice([1, 2, 3]),
        mamba_expand=rng.choice([1, 2]),
        mamba_d_state=rng.choice([5, 8, 16]),
        mamba_d_conv=rng.choice([2, 3, 4]),
        mamba_dt_rank=rng.choice(["auto", 5]),
        mamba_conv_bias=rng.random() < 0.7,
        mamba_proj_bias=rng.random() < 0.5,
        rms_norm_eps=rng.choice([1e-5, 1e-2]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.ZambaConfig(
        **{name: value for name, value in common.items() if name != "head_dim"}
        | {"tie_word_embeddings": True},
        num_hidden_layers=5,
        attn_layer_period=2,
        attn_layer_offset=1,
        intermediate_size=24,
        n_mamba_heads=2,
        mamba_d_state=8,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"hidden_act": "silu"}, "hidden_act", "'gelu'"),
    ({"hidden_mamba_act": "gelu"}, "hidden_mamba_act", "'silu'"),
    ({"n_mamba_heads": 5}, "n_mamba_heads", "hidden_size (64)"),
    ({"attention_hidden_size": 33}, "attention_hidden_size", "64"),
    ({"layers_block_type": ["mamba"]}, "layer_types", "num_hidden_layers (5)"),
)
