"""Ling-3.0."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention, rope

KINDS = ("linear_attention", "full_attention")
ABSENT = {"pad_token_id": None, "bos_token_id": None}


def draw(rng: Random) -> PreTrainedConfig:
    """Draw a model whose delta attention heads differ in number and width from the rotated ones."""
    fields, layers, groups = {**attention(rng), **rope(rng)}, rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    top_groups, size = rng.choice([1, groups]), rng.choice([2, 3])
    return transformers.BailingHybridConfig(
        **{**fields, **ABSENT},
        num_hidden_layers=layers,
        layer_types=[rng.choice(KINDS) for _ in range(layers)],
        mlp_layer_types=[rng.choice(["dense", "sparse"]) for _ in range(layers)],
        intermediate_size=rng.choice([20, 33]),
        kv_lora_rank=rng.choice([5, 10, 16]),
        q_lora_rank=rng.choice([None, None, 7]),
        qk_nope_head_dim=rng.choice([4, 6, 9]),
        qk_rope_head_dim=rng.choice([2, 4, 6]),
        v_head_dim=rng.choice([5, 8, 17]),
        linear_head_dim=rng.choice([4, 7, 12]),
        linear_num_heads=rng.choice([1, 2, 3]),
        linear_conv_kernel_dim=rng.choice([2, 3, 4]),
        kda_safe_gate=rng.random() < 0.7,
        kda_lower_bound=rng.choice([-5.0, -1.5]),
        moe_intermediate_size=rng.choice([6, 16]),
        num_local_experts=groups * size,
        n_group=groups,
        topk_group=top_groups,
        num_experts_per_tok=rng.choice([1, 2, top_groups * size]),
        n_shared_experts=rng.choice([1, 2]),
        norm_topk_prob=rng.random() < 0.7,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    return transformers.BailingHybridConfig(
        **{**common, "num_key_value_heads": common["num_attention_heads"]},
        num_hidden_layers=3,
        layer_types=[KINDS[0], KINDS[1], KINDS[0]],
        mlp_layer_types=["dense", "sparse", "sparse"],
        intermediate_size=24,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        linear_head_dim=8,
        linear_num_heads=4,
        moe_intermediate_size=8,
        num_local_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"layer_types": None, "layer_group_size": 2}, "layer_group_size", "whole groups, or layer_types"),
    ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types", "each of 3 layers"),
    ({"architectures": ["BailingMoeV2_5ForCausalLM"]}, "architectures", "Ling-3.0"),
    ({"num_expert_group": 3}, "num_expert_group", "num_experts (4)"),
    ({"topk_group": 3}, "topk_group", "no more groups than there are (2)"),
    ({"num_experts_per_token": 3}, "num_experts_per_token", "no more experts"),
    ({"expert_swiglu_limit_list": [4, 0, 4]}, "expert_swiglu_limit_list", "layers with experts alone"),
    ({"share_expert_swiglu_limit_list": [0, 4]}, "share_expert_swiglu_limit_list", "each of 3 layers"),
    ({"moe_shared_expert_intermediate_size": 9}, "moe_shared_expert_intermediate_size", "8"),
    ({"scoring_func": "softmax"}, "scoring_func", "'sigmoid'"),
    ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias", "True"),
    ({"kda_lower_bound": 0.0}, "kda_lower_bound", "below 0"),
    ({"no_kda_lora": False}, "no_kda_lora", "True"),
    ({"use_mla_nope": True}, "use_mla_nope", "with positions"),
    ({"use_bias": True}, "use_bias", "without biases"),
    ({"attention_bias": True}, "attention_bias", "without biases"),
    (
        {"gated_attention_proj_granularity_type": "element_wise"},
        "gated_attention_proj_granularity_type",
        "head",
    ),
    ({"qk_rope_head_dim": 3}, "qk_rope_head_dim", "even"),
    ({"rope_interleave": False}, "rope_interleave", "True"),
    ({"rotary_dim": 2}, "rotary_dim", "4"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type", "'default'"),
    ({"num_key_value_heads": 2}, "num_key_value_heads", "4"),
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers", "1"),
)
