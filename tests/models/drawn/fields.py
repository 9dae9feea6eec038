"""Fields whose names several families share, drawn at odd sizes."""

from random import Random
from typing import Any


def attention(rng: Random) -> dict[str, Any]:
    """Draw attention sizes and the fields that every config has; the hidden size suits two expanded heads."""
    kv_heads = rng.choice([1, 2, 3])
    return {
        "vocab_size": rng.choice([61, 96, 131]),
        "hidden_size": rng.choice([24, 36, 48]),
        "num_attention_heads": kv_heads * rng.choice([1, 2]),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([8, 12, 16]),
        "initializer_range": 0.15,
        "max_position_embeddings": 512,
        "tie_word_embeddings": rng.random() < 0.5,
        "eos_token_id": rng.choice([None, 7, [5, 9]]),
    }


def rope(rng: Random) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e4, 1e6])}}


def llama3(rng: Random) -> dict[str, Any]:
    """Draw default or Llama-3-scaled rotary positions."""
    theta = {"rope_theta": rng.choice([1e4, 5e5])}
    if rng.random() < 0.4:
        return {"rope_parameters": {"rope_type": "default", **theta}}
    low = rng.choice([1.0, 1.5])
    scaled = {"rope_type": "llama3", "factor": rng.choice([2.0, 8.0, 32.0]), "low_freq_factor": low}
    scaled |= {"high_freq_factor": low * rng.choice([1.5, 4.0])}
    return {"rope_parameters": {**scaled, "original_max_position_embeddings": rng.choice([8, 32]), **theta}}


def mamba(rng: Random) -> dict[str, Any]:
    """Draw Mamba-2 twice as wide as the model, with heads that divide any of the hidden sizes."""
    groups = rng.choice([1, 2])
    return {
        "mamba_n_heads": groups * rng.choice([2, 3, 6]),
        "mamba_d_head": "auto",
        "mamba_n_groups": groups,
        "mamba_d_state": rng.choice([5, 8, 16]),
        "mamba_d_conv": rng.choice([2, 3, 4]),
        "mamba_conv_bias": rng.random() < 0.7,
        "mamba_proj_bias": rng.random() < 0.5,
        "mamba_chunk_size": rng.choice([4, 16]),
        "time_step_limit": rng.choice([(0.0, float("inf")), (0.01, 0.5)]),
    }
