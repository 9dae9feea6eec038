"""Values for every field of transformers' config classes, each different from that of a small base model.

A field without an entry here, such as one of a newer transformers, fails the test. Most entries are only
values: the logits of both implementations are compared, so a field without effect (dropout, choice of
kernels) passes. `refused` marks values that specdec does not support.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.agreeing import CONFIGS

GENERIC = frozenset(own.name for own in fields(PreTrainedConfig))
"""Fields of every config, which record how files were made."""


@dataclass(frozen=True)
class Option:
    """A value of a field, with other fields that must change with it."""

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    refused: bool = False


def also(value: Any, **beside: Any) -> Option:
    return Option(value, beside)


def refused(value: Any, **beside: Any) -> Option:
    return Option(value, beside, refused=True)


def _mamba(kind: type[PreTrainedConfig]) -> Callable[[], PreTrainedConfig]:
    def config() -> PreTrainedConfig:
        own = CONFIGS["mamba"]()
        known = {one.name for one in fields(kind)} - GENERIC  # type: ignore[arg-type]
        return kind(**{name: value for name, value in own.to_dict().items() if name in known})

    return config


BASES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    **CONFIGS,
    "mamba": _mamba(transformers.MambaConfig),
    "falcon_mamba": _mamba(transformers.FalconMambaConfig),
}

FULL, LINEAR, SLIDING, CONV = "full_attention", "linear_attention", "sliding_attention", "conv"
SCALED: tuple[Option, ...] = tuple(
    refused({"rope_theta": 1e4, **kind})
    for kind in (
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    )
)
ROPE = Option({"rope_type": "default", "rope_theta": 1e6})
LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_SCALED: Mapping[str, Any] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
SCALES = (LLAMA3, LINEAR_SCALED, YARN)
UNSCALED = (*SCALED, *map(refused, SCALES))
"""For families whose rotary positions cannot be scaled."""
PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

VALUES: Mapping[str, tuple[Any, ...]] = {
    "adapter_rank": (3,),
    "add_bias_linear": (True,),
    "attention_bias": (True,),
    "attention_dropout": (0.5,),
    "attention_head_dim": (8,),
    "attention_hidden_size": (refused(48),),
    "attention_in_multiplier": (0.7,),
    "attention_multiplier": (1.0,),
    "attention_out_multiplier": (0.4,),
    "attn_layer_indices": ([0, 2], []),
    "attn_layer_offset": (0,),
    "attn_layer_period": (2,),
    "block_auto_adjust_ff_dim": (False,),
    "block_ffn_dim_multiplier": (1.3,),
    "block_multiple_of": (5,),
    "block_size": (5,),
    "bos_token_id": (3,),
    "chunk_size": (4,),
    "conv_L_cache": (2,),
    "conv_bias": (True,),
    "conv_kernel": (2,),
    "decoder_sparse_step": (2,),
    "embedding_multiplier": (2.0,),
    "eos_token_id": (7,),
    "expand": (1,),
    "expert_layer_offset": (0,),
    "expert_layer_period": (also(1, expert_layer_offset=0),),
    "first_k_dense_replace": (also(1, mlp_layer_types=None),),
    "full_attn_alpha_factor": (0.6,),
    "full_attn_beta_factor": (0.6,),
    "full_attn_idxs": (also([0, 2], layer_types=None),),
    "head_dim": (16,),
    "hidden_act": (refused("gelu"), refused("relu")),
    "hidden_dropout": (0.5,),
    "hidden_mamba_act": (refused("gelu"),),
    "hidden_size": (48,),
    "initializer_range": (0.2,),
    "intermediate_size": (20,),
    "kda_lower_bound": (-1.5,),
    "kda_safe_gate": (False,),
    "key_multiplier": (1.25,),
    "kv_lora_rank": (10,),
    "layer_group_size": (also(3, layer_types=None),),
    "layer_norm_epsilon": (0.3,),
    "layer_types": ([FULL, LINEAR, LINEAR], refused([SLIDING, LINEAR, LINEAR])),
    "linear_a_log_max": (8.0,),
    "linear_a_log_min": (0.5,),
    "linear_allow_neg_eigval": (False,),
    "linear_attn_alpha_factor": (0.6,),
    "linear_attn_beta_factor": (0.6,),
    "linear_conv_kernel_dim": (2,),
    "linear_dt_init_floor": (0.01,),
    "linear_dt_max": (0.5,),
    "linear_dt_min": (0.01,),
    "linear_head_dim": (6,),
    "linear_key_head_dim": (6,),
    "linear_num_heads": (3,),
    "linear_num_key_heads": (4, 1),
    "linear_num_value_heads": (6, 2),
    "linear_value_head_dim": (6,),
    "lm_head_multiplier": (0.3,),
    "logits_scaling": (6.0,),
    "mamba_chunk_size": (4,),
    "mamba_conv_bias": (False,),
    "mamba_d_conv": (2,),
    "mamba_d_head": (also(16, mamba_n_heads=4), also("auto", mamba_n_heads=4)),
    "mamba_d_ssm": (also(48, mamba_d_head=12), also(None, mamba_d_head=16)),
    "mamba_d_state": (5,),
    "mamba_dt_rank": (5, "auto"),
    "mamba_expand": (1,),
    "mamba_head_dim": (12,),
    "mamba_hidden_act": (refused("gelu"),),
    "mamba_n_groups": (4, 1),
    "mamba_n_heads": (also(4, mamba_d_head=16),),
    "mamba_ngroups": (1, 4),
    "mamba_norm_before_gate": (True,),
    "mamba_num_heads": (6,),
    "mamba_proj_bias": (True,),
    "mamba_rms_norm": (False,),
    "mamba_ssm_cache_dtype": ("bfloat16",),
    "max_position_embeddings": (300,),
    "max_window_layers": (1, also(1, use_sliding_window=True, sliding_window=5, layer_types=None)),
    "mixer_rms_eps": (0.3,),
    "mlp_alpha_factor": (0.6,),
    "mlp_beta_factor": (0.6,),
    "mlp_bias": (True,),
    "mlp_hidden_act": (refused("silu"), refused("gelu")),
    "mlp_layer_types": (["sparse", "dense", "sparse"],),
    "mlp_multipliers": ([0.5, 1.4],),
    "mlp_only_layers": ([0], [1, 2]),
    "moe_intermediate_size": (6,),
    "moe_latent_size": (12,),
    "moe_shared_expert_intermediate_size": (10,),
    "moe_shared_expert_overlap": (False,),
    "mtp_layers_block_type": ([FULL, "moe"],),
    "mtp_loss_scaling_factor": (0.5,),
    "n_group": (1,),
    "n_groups": (1, 4),
    "n_mamba_heads": (8, 1),
    "n_routed_experts": (6,),
    "n_shared_experts": (2,),
    "norm_eps": (0.3,),
    "norm_topk_prob": (False,),
    "num_attention_heads": (8,),
    "num_dense_layers": (2, 0),
    "num_experts": (6,),
    "num_experts_per_tok": (1,),
    "num_heads": (also(16, head_dim=4),),
    "num_hidden_layers": (also(2, layer_types=[FULL, LINEAR]),),
    "num_key_value_heads": (4, 1),
    "num_local_experts": (6,),
    "num_logits_to_keep": (2,),
    "num_mem_blocks": (1, 3),
    "num_mtp_layers": (0,),
    "num_nextn_predict_layers": (0,),
    "output_router_logits": (True,),
    "pad_token_id": (0,),
    "position_embedding_type": ("rope", also("rope", rope_parameters=ROPE.value)),
    "pretraining_tp": (2,),
    "projectors_bias": (True,),
    "q_lora_rank": (7,),
    "qk_nope_head_dim": (6,),
    "qk_rope_head_dim": (6, 2),
    "rescale_prenorm_residual": (False, True),
    "residual_in_fp32": (False, True),
    "residual_multiplier": (0.22,),
    "rms_norm_eps": (0.3,),
    "rope_parameters": (ROPE, *SCALES, refused(PART), *SCALED),
    "rope_theta": (also(1e4, rope_parameters=None),),
    "routed_scaling_factor": (0.7,),
    "router_aux_loss_coef": (0.1,),
    "router_jitter_noise": (0.5,),
    "shared_expert_intermediate_size": (10,),
    "shared_intermediate_size": (10,),
    "short_conv_kernel_size": (2,),
    "sliding_window": (5,),
    "ssm_in_multiplier": (0.6,),
    "ssm_multipliers": ([1.3, 0.6, 1.7, 0.5, 1.4],),
    "ssm_out_multiplier": (0.6,),
    "ssm_state_size": (5,),
    "state_size": (5,),
    "tie_word_embeddings": (True, False),
    "time_step_floor": (0.01,),
    "time_step_init_scheme": ("constant",),
    "time_step_limit": ((0.01, 0.5), (0.0, 0.1)),
    "time_step_max": (0.2,),
    "time_step_min": (0.5,),
    "time_step_rank": (5, "auto"),
    "time_step_scale": (2.0,),
    "topk_group": (2,),
    "use_associative_scan": (False,),
    "use_attention_gate": (False,),
    "use_bias": (True,),
    "use_cache": (False,),
    "use_conv_bias": (False,),
    "use_expert_bias": (False,),
    "use_long_context": (refused(True),),
    "use_mamba_kernels": (False,),
    "use_mambapy": (True,),
    "use_mem_eff_path": (True,),
    "use_mem_rope": (False,),
    "use_sandwich_norm": (False,),
    "use_shared_attention_adapter": (also(True, num_key_value_heads=4),),
    "use_sliding_window": (True,),
    "v_head_dim": (6,),
    "vocab_size": (also(61, eos_token_id=7),),
    "z_loss_coefficient": (0.5,),
}
"""For all families that have the field, except the overrides below."""

_MAMBAS: Mapping[str, tuple[Any, ...]] = {
    "hidden_size": (also(48, mamba_d_head=12),),
    "mamba_expand": (also(1, mamba_d_head=4),),
    "rope_parameters": (ROPE, *UNSCALED),
}
OWN: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "qwen3": {
        "layer_types": (refused([FULL, SLIDING]),),
        "num_hidden_layers": (also(3, layer_types=[FULL] * 3),),
        "sliding_window": (5, also(5, use_sliding_window=True, layer_types=[SLIDING, FULL])),
    },
    "qwen3_moe": {
        "mlp_only_layers": ([0], [0, 1]),
        "num_hidden_layers": (3,),
        "sliding_window": (5, also(5, use_sliding_window=True)),
    },
    "llama": {"num_hidden_layers": (3,)},
    "mistral": {"num_hidden_layers": (3,), "sliding_window": (5, None)},
    "qwen2": {
        "layer_types": ([SLIDING, FULL], refused([SLIDING, FULL], use_sliding_window=False)),
        "max_window_layers": (0, also(0, layer_types=None), also(2, layer_types=None)),
        "num_hidden_layers": (also(3, layer_types=[SLIDING, FULL, FULL]),),
        "sliding_window": (5, also(None, layer_types=None)),
        "use_sliding_window": (also(False, layer_types=None),),
    },
    "smollm3": {
        "layer_types": (refused([FULL, SLIDING, FULL]),),
        "num_hidden_layers": (also(2, layer_types=[FULL] * 2),),
        "no_rope_layers": ([0, 1, 0], [1, 1, 1, 0], [0, 0, 0]),
        "no_rope_layer_interval": (2, also(2, no_rope_layers=None), also(1, no_rope_layers=None)),
        "sliding_window": (
            5,
            also(5, use_sliding_window=True, layer_types=None),
            also(5, use_sliding_window=True, layer_types=[SLIDING, FULL, SLIDING]),
        ),
    },
    "qwen3_next": {
        "rope_parameters": (ROPE, PART, *SCALES, {**YARN, "partial_rotary_factor": 0.75}, *SCALED)
    },
    "qwen3_5": {"rope_parameters": (ROPE, PART, *SCALES, {**YARN, "partial_rotary_factor": 0.75}, *SCALED)},
    "qwen3_5_moe": {
        "rope_parameters": (ROPE, PART, *SCALES, {**YARN, "partial_rotary_factor": 0.75}, *SCALED)
    },
    "nemotron_h": {
        "attention_bias": (refused(True),),
        "layers_block_type": ([LINEAR, "mlp", FULL, "moe", LINEAR], [FULL, "mlp"]),
        "mlp_bias": (refused(True), also(True, layers_block_type=[LINEAR, "mlp", FULL])),
        "n_group": (also(2, num_experts_per_tok=2),),
        "n_shared_experts": (refused(2),),
        "residual_in_fp32": (refused(True),),
        "sliding_window": (refused(5),),
        "tie_word_embeddings": (refused(True),),
        "time_step_limit": (refused((0.01, 0.5)),),
        "topk_group": (also(2, n_group=2),),
    },
    "granitemoehybrid": {
        **_MAMBAS,
        "num_local_experts": (6, 0),
        "position_embedding_type": ("rope",),
        "rope_parameters": (
            *(
                Option(one.value, {"position_embedding_type": "rope"}, one.refused)
                for one in (ROPE, *map(Option, SCALES), *SCALED)
            ),
            refused(PART, position_embedding_type="rope"),
            LINEAR_SCALED,
        ),
    },
    "bamba": {
        **_MAMBAS,
        "num_hidden_layers": (2,),
        "rope_parameters": (
            ROPE,
            *(PART | {"partial_rotary_factor": part} for part in (0.25, 1.0)),
            *UNSCALED,
        ),
    },
    "falcon_h1": {
        "mamba_d_head": (also(16, mamba_n_heads=2),),
        "mamba_n_heads": (also(2, mamba_d_head=16),),
        "num_hidden_layers": (3,),
        "mamba_expand": (1, also(1, mamba_d_ssm=None)),
    },
    "mamba2": {
        "expand": (also(1, num_heads=4),),
        "head_dim": (also(16, num_heads=4),),
        "hidden_size": (also(48, num_heads=12),),
        "num_hidden_layers": (2,),
    },
    "mamba": {"num_hidden_layers": (2,)},
    "falcon_mamba": {"num_hidden_layers": (2,)},
    "jamba": {"num_hidden_layers": (2, 5)},
    "lfm2": {
        "layer_types": ([FULL, CONV, CONV], refused([SLIDING, CONV, CONV])),
        "num_hidden_layers": (also(2, layer_types=[FULL, CONV]),),
    },
    "lfm2_moe": {
        "layer_types": ([FULL, CONV, CONV], refused([SLIDING, CONV, CONV])),
        "num_hidden_layers": (also(2, layer_types=[FULL, CONV]),),
    },
    "lfm3": {
        "layer_types": ([FULL, CONV, SLIDING, FULL],),
        "num_hidden_layers": (also(2, layer_types=[FULL, SLIDING]),),
        "rope_parameters": (
            {kind: {"rope_type": "default", "rope_theta": 1e6} for kind in (FULL, SLIDING)},
            {
                kind: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25}
                for kind in (FULL, SLIDING)
            },
            *(refused({FULL: own, SLIDING: ROPE.value}) for own in (SCALED[0].value, *SCALES)),
            refused({FULL: PART, SLIDING: ROPE.value}),
            None,
        ),
    },
    "minimax": {"rope_parameters": (ROPE, refused(PART), *UNSCALED)},
    "kimi_linear": {
        "attention_bias": (refused(True),),
        "num_hidden_layers": (also(2, layer_types=[FULL, LINEAR], mlp_layer_types=["dense", "sparse"]),),
        "num_attention_heads": (also(3, num_key_value_heads=3),),
        "num_key_value_heads": (refused(2),),
    },
    "bailing_hybrid": {
        "attention_bias": (refused(True),),
        "num_hidden_layers": (also(2, layer_types=[FULL, LINEAR], mlp_layer_types=["dense", "sparse"]),),
        "rope_parameters": (ROPE, PART, *UNSCALED),
        "num_attention_heads": (also(3, num_key_value_heads=3),),
        "num_key_value_heads": (refused(2),),
    },
    "zamba2": {
        "n_mamba_heads": (8,),
        "tie_word_embeddings": (
            also(False, layers_block_type=["hybrid", *["mamba"] * 3, "hybrid"], num_mem_blocks=2),
        ),
        "hidden_act": (refused("silu"), refused("gelu_pytorch_tanh")),
        "layers_block_type": (["mamba", "hybrid", "hybrid", "mamba", "hybrid"],),
        "num_hidden_layers": (also(2, layers_block_type=["hybrid", "mamba"]),),
    },
    "zamba": {
        "hidden_size": (also(48, attention_hidden_size=None, attention_head_dim=None),),
        "tie_word_embeddings": (also(False, layers_block_type=["hybrid", *["mamba"] * 4]),),
        "hidden_act": (refused("silu"), refused("gelu_pytorch_tanh")),
        "layers_block_type": (["mamba", "hybrid", "hybrid", "mamba", "hybrid"],),
        "num_hidden_layers": (also(2, layers_block_type=["hybrid", "mamba"], tie_word_embeddings=False),),
        "attn_layer_offset": (also(0, layers_block_type=None),),
        "attn_layer_period": (also(3, layers_block_type=None),),
    },
    "olmo_hybrid": {},
}


def declared(family: str) -> dict[str, Any]:
    """Return the base model's values of the fields that its config class declares."""
    config = BASES[family]()
    names = [own.name for own in fields(config) if own.name not in GENERIC]  # type: ignore[arg-type]
    return {name: getattr(config, name) for name in names}


def as_file(family: str) -> dict[str, Any]:
    """Return the base model's config.json with the names used there, without derived fields."""
    config = BASES[family]()
    names = {own.name for own in fields(config)} - GENERIC  # type: ignore[arg-type]
    names |= {*config.attribute_map, *config.attribute_map.values(), "model_type"}
    rebuilt = type(config)(**deepcopy(declared(family)))
    return {name: value for name, value in rebuilt.to_dict().items() if name in names}


def options(family: str, name: str) -> tuple[Option, ...]:
    """List the values to try for a field, except the base model's own."""
    own = OWN[family].get(name, VALUES.get(name, ()))
    listed = (one if isinstance(one, Option) else Option(one) for one in own)
    base = declared(family).get(name)
    return tuple(one for one in listed if one.beside or one.value != base)
