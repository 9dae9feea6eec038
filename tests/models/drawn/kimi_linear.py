"""Kimi-Linear."""

from collections.abc import Mapping
from random import Random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.drawn.fields import attention

KINDS = ("linear_attention", "full_attention")
ABSENT = {"pad_token_id": None, "bos_token_id": None}


def draw(rng: Random) -> PreTrainedConfig:
    fields, layers, groups = attention(rng), rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    fields.pop("head_dim")
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    top_groups, size = rng.choice([1, groups]), rng.choice([2, 3])
    return transformers.KimiLinearConfig(
        **{**fields, **ABSENT},
        num_hidden_layers=layers,
        layer_types=[rng.choice(KINDS) for _ in range(layers)],
        mlp_layer_types=[rng.choice(["dense", "sparse"]) for _ in range(layers)],
        intermediate_size=rng.choice([20, 33]),
        kv_lora_rank=rng.choice([5, 10, 16]),
        q_lora_rank=rng.choice([None, None, 7]),
        qk_nope_head_dim=rng.choice([4, 6, 9]),
        qk_rope_head_dim=rng.choice([2, 3, 4]),
        v_head_dim=rng.choice([5, 8, 17]),
        linear_head_dim=rng.choice([4, 7, 12]),
        linear_num_heads=rng.choice([1, 2, 3]),
        linear_conv_kernel_dim=rng.choice([2, 3, 4]),
        moe_intermediate_size=rng.choice([6, 16]),
        num_experts=groups * size,
        n_group=groups,
        topk_group=top_groups,
        num_experts_per_tok=rng.choice([1, 2, top_groups * size]),
        n_shared_experts=rng.choice([1, 2]),
        norm_topk_prob=rng.random() < 0.7,
        routed_scaling_factor=rng.choice([1.0, 2.446]),
    )


def agreeing(common: Mapping[str, Any]) -> PreTrainedConfig:
    own = {name: value for name, value in common.items() if name != "head_dim"}
    return transformers.KimiLinearConfig(
        **{**own, "num_key_value_heads": common["num_attention_heads"]},
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
        num_experts=4,
        n_group=2,
        num_experts_per_tok=2,
    )


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"layer_types": None}, "linear_attn_config.full_attn_layers", "from 1 to 3 once"),
    ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types", "each of 3 layers"),
    ({"num_expert_group": 3}, "num_expert_group", "num_experts (4)"),
    ({"topk_group": 3}, "topk_group", "no more groups than there are (2)"),
    ({"num_experts_per_token": 3}, "num_experts_per_token", "no more experts"),
    ({"attention_bias": True}, "attention_bias", "without biases"),
    ({"mla_use_nope": False}, "mla_use_nope", "True"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func", "'sigmoid'"),
    ({"num_key_value_heads": 2}, "num_key_value_heads", "4"),
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers", "0"),
)
