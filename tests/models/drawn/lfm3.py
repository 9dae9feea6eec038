"""LFM3."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention

CONV, SLIDING, FULL = KINDS = ("conv", "sliding_attention", "full_attention")


def rope(rng: Random) -> dict[str, Any]:
    """Draw a rotation for each kind; 0.45 of a head of 8 to 16 is not an integer number of pairs."""
    kinds: tuple[dict[str, Any], ...] = (
        {"rope_type": "default"},
        {"rope_type": "proportional", "partial_rotary_factor": rng.choice([0.1, 0.45, 0.5])},
        {"rope_type": "proportional", "partial_rotary_factor": 1.0},
    )
    return {kind: {**rng.choice(kinds), "rope_theta": rng.choice([1e4, 1e6])} for kind in (SLIDING, FULL)}


def draw(rng: Random) -> PreTrainedConfig:
    """Draw layers, at least one with full attention, for transformers' caches, and one sliding."""
    layers = rng.choice([2, 3, 4, 5])
    kinds = [FULL, SLIDING, *(rng.choice(KINDS) for _ in range(layers - 2))]
    rng.shuffle(kinds)
    own: dict[str, Any] = {"layer_types": kinds, "rope_parameters": rope(rng)}
    if rng.random() < 0.25:
        own, layers = {}, rng.choice([3, 5, 7])
    return transformers.Lfm3Config(
        **attention(rng),
        **own,
        pad_token_id=None,
        num_hidden_layers=layers,
        intermediate_size=rng.choice([20, 33]),
        sliding_window=rng.choice([1, 3, 16, 17, 40, 500]),
        conv_L_cache=rng.choice([2, 3, 7, 7]),
        conv_bias=rng.random() < 0.5,
        attention_bias=rng.random() < 0.3,
        use_sandwich_norm=rng.random() < 0.7,
        use_attention_gate=rng.random() < 0.7,
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.Lfm3Config(
        **common,
        num_hidden_layers=4,
        layer_types=[CONV, SLIDING, FULL, SLIDING],
        intermediate_size=24,
        sliding_window=7,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"layer_types": ["conv", "chunked_attention", "conv", "conv"]}, "layer_types", "not chunked_attention"),
    ({"sliding_window": None}, "sliding_window", "at least 1"),
    ({"sliding_window": 0}, "sliding_window", "at least 1"),
    ({"head_dim": 9}, "head_dim", "even"),
    ({"num_key_value_heads": None}, "num_key_value_heads", "at least 1"),
    ({"use_attention_gate": 1}, "use_attention_gate", "true or false"),
    ({"use_sandwich_norm": "no"}, "use_sandwich_norm", "true or false"),
    ({"conv_L_cache": 0}, "conv_L_cache", "at least 1"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.full_attention", "object"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        "rope_parameters.full_attention.rope_type",
        "'default' or 'proportional'",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 8.0}}},
        "rope_parameters.full_attention.factor",
        "1",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
        "rope_parameters.full_attention.partial_rotary_factor",
        "1",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
        "rope_parameters.full_attention.partial_rotary_factor",
        "from 0 to 1",
    ),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention.rope_theta", "finite"),
)
