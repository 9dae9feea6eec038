"""LFM2 with experts."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn import lfm2


def draw(rng: Random) -> PreTrainedConfig:
    own, experts = lfm2.mixers(rng), rng.choice([3, 5, 8])
    return transformers.Lfm2MoeConfig(
        **own,
        intermediate_size=rng.choice([20, 33]),
        num_dense_layers=rng.choice([0, 1, own["num_hidden_layers"]]),
        moe_intermediate_size=rng.choice([6, 16]),
        num_experts=experts,
        num_experts_per_tok=rng.choice([1, 2, 3]),
        norm_topk_prob=rng.random() < 0.7,
        use_expert_bias=rng.random() < 0.7,
        routed_scaling_factor=rng.choice([1.0, 1.8]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.Lfm2MoeConfig(
        **common,
        num_hidden_layers=3,
        layer_types=[lfm2.KINDS[0], lfm2.KINDS[1], lfm2.KINDS[0]],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        intermediate_size=24,
        num_dense_layers=1,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"num_experts_per_tok": 5}, "num_experts_per_tok", "at most num_experts (4)"),
    ({"norm_topk_prob": 1}, "norm_topk_prob", "true or false"),
    ({"num_dense_layers": -1}, "num_dense_layers", "at least 0"),
    ({"use_expert_bias": "no"}, "use_expert_bias", "true or false"),
)
