"""Configurations of named sizes, for random models that are measured and never read.

They are Hugging Face configs. Sizes are those of the published models; what is ours is said beside it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _qwen3_5(
    hidden: int, layers: int, *, heads: int, kv_heads: int, value_heads: int, **other: object
) -> dict[str, Any]:
    """Fill in what this generation shares: three gated delta nets to one attention, a one-layer head."""
    return {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": None,
        **other,
    }


def _granite(hidden: int, layers: int, *, heads: int, **other: object) -> dict[str, Any]:
    """Fill in what Granite 4's sizes share: one attention in ten layers, without positions."""
    return {
        "model_type": "granitemoehybrid",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(layers)],
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "mamba_n_heads": hidden // 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
        "logits_scaling": 16.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        **other,
    }


def _falcon_h1(hidden: int, layers: int, *, heads: int, **other: object) -> dict[str, Any]:
    """Fill in what Falcon-H1's sizes share."""
    return {
        "model_type": "falcon_h1",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_rms_norm": False,
        "embedding_multiplier": 5.65,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.5,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.7, 0.9, 0.8, 0.6, 0.9],
        "mlp_multipliers": [0.9, 0.6],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        **other,
    }


def _jamba(hidden: int, layers: int, *, heads: int, **other: object) -> dict[str, Any]:
    """Fill in what Jamba's sizes share: seven mixers of Mamba-1 to one attention."""
    return {
        "model_type": "jamba",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": hidden // 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        **other,
    }


def _lfm2(
    hidden: int, layers: int, *, attend: tuple[int, ...], heads: int, **other: object
) -> dict[str, Any]:
    """Fill in what LFM2 shares, dense or not; the layers that do not attend are short convolutions."""
    return {
        "dtype": "bfloat16",
        "vocab_size": 65536,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if i in attend else "conv" for i in range(layers)],
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        **other,
    }


def _kimi_linear(hidden: int, layers: int, *, heads: int, **other: object) -> dict[str, Any]:
    """Fill in what is alike in Kimi-Linear's sizes: every fourth layer attends, and the last one."""
    attend = [i for i in range(1, layers + 1) if i % 4 == 0 or i == layers]
    return {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "linear_attn_config": {
            "full_attn_layers": attend,
            "kda_layers": [i for i in range(1, layers + 1) if i not in attend],
            "head_dim": 128,
            "num_heads": heads,
            "short_conv_kernel_size": 4,
        },
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_shared_experts": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
        "model_max_length": 1048576,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        **other,
    }


_SMALL = _qwen3_5(
    1024, 24, heads=8, kv_heads=2, value_heads=16, intermediate_size=3584, tie_word_embeddings=True
)

SHAPES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        # Ours: the checkpoint that ships. Deep for its width, as large models are; a head is one layer.
        "tiny": _qwen3_5(
            192,
            12,
            heads=4,
            kv_heads=2,
            value_heads=8,
            head_dim=64,
            linear_num_key_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            intermediate_size=640,
            vocab_size=4096,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
            max_position_embeddings=4096,
            dtype="float32",
        ),
        # Ours: the 0.8b with a vocabulary of 32k.
        "0.5b": {**_SMALL, "vocab_size": 32768},
        "0.8b": _SMALL,
        "qwen3.5-27b": _qwen3_5(5120, 64, heads=24, kv_heads=4, value_heads=48, intermediate_size=17408),
        "qwen3.5-35b-a3b": _qwen3_5(
            2048,
            40,
            heads=16,
            kv_heads=2,
            value_heads=32,
            model_type="qwen3_5_moe_text",
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        "qwen3-next-80b-a3b": _qwen3_5(
            2048,
            48,
            heads=16,
            kv_heads=2,
            value_heads=32,
            model_type="qwen3_next",
            vocab_size=151936,
            intermediate_size=5632,
            num_experts=512,
            num_experts_per_tok=10,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000_000.0,
                "partial_rotary_factor": 0.25,
            },
        ),
        "nemotron-h-8b": {
            "model_type": "nemotron_h",
            "dtype": "bfloat16",
            "vocab_size": 131072,
            "hidden_size": 4096,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "time_step_min": 1e-3,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "eos_token_id": None,
        },
        "granite-4-h-small": _granite(
            4096,
            40,
            heads=32,
            vocab_size=100352,
            num_local_experts=72,
            num_experts_per_tok=10,
            intermediate_size=768,
            shared_intermediate_size=1536,
        ),
        # Ours: what a CPU holds of it, without experts.
        "granite-0.4b": _granite(
            1024, 20, heads=8, vocab_size=32768, num_local_experts=0, shared_intermediate_size=3584
        ),
        "falcon-mamba-7b": {
            "model_type": "falcon_mamba",
            "dtype": "bfloat16",
            "vocab_size": 65024,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "state_size": 16,
            "intermediate_size": 8192,
            "time_step_rank": 256,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "layer_norm_epsilon": 1e-5,
            "mixer_rms_eps": 1e-6,
            "tie_word_embeddings": False,
            "eos_token_id": None,
        },
        "jamba-mini": _jamba(4096, 32, heads=32, intermediate_size=14336, num_experts=16, vocab_size=65536),
        # Ours: what a CPU holds of it, without experts.
        "jamba-0.4b": _jamba(1024, 20, heads=8, intermediate_size=3584, num_experts=1, vocab_size=32768),
        # Their multipliers are ours: they cost the same whatever they are.
        "falcon-h1-7b": _falcon_h1(
            3072,
            44,
            heads=12,
            head_dim=128,
            vocab_size=130048,
            intermediate_size=12288,
            mamba_d_ssm=3072,
            mamba_n_heads=24,
            mamba_d_head=128,
            mamba_d_state=256,
        ),
        "falcon-h1-0.5b": _falcon_h1(
            1024,
            36,
            heads=8,
            head_dim=64,
            vocab_size=32784,
            intermediate_size=2048,
            mamba_d_ssm=1536,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_d_state=128,
        ),
        "lfm2-350m": _lfm2(
            1024,
            16,
            attend=(2, 5, 8, 10, 12, 14),
            heads=16,
            model_type="lfm2",
            intermediate_size=6656,
            block_auto_adjust_ff_dim=True,
            block_ffn_dim_multiplier=1.0,
            block_multiple_of=256,
        ),
        "lfm2-8b-a1b": _lfm2(
            2048,
            24,
            attend=(2, 6, 10, 14, 18, 21),
            heads=32,
            model_type="lfm2_moe",
            intermediate_size=7168,
            num_dense_layers=2,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=1792,
            norm_topk_prob=True,
            use_expert_bias=True,
            routed_scaling_factor=1.0,
        ),
        "minimax-text-01": {
            "model_type": "minimax",
            "dtype": "bfloat16",
            "vocab_size": 200064,
            "hidden_size": 6144,
            "num_hidden_layers": 80,
            "layer_types": [*["linear_attention"] * 7, "full_attention"] * 10,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rotary_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
            "intermediate_size": 9216,
            "num_local_experts": 32,
            "num_experts_per_tok": 2,
            "full_attn_alpha_factor": 3.5565588200778455,
            "linear_attn_alpha_factor": 3.5565588200778455,
            "mlp_alpha_factor": 3.5565588200778455,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 10240000,
            "tie_word_embeddings": False,
            "eos_token_id": None,
        },
        "kimi-linear-48b": _kimi_linear(
            2304,
            27,
            heads=32,
            vocab_size=163840,
            intermediate_size=9216,
            first_k_dense_replace=1,
            num_experts=256,
            num_experts_per_token=8,
            moe_intermediate_size=1024,
        ),
        # Ours: what a CPU holds of it, without experts.
        "kimi-linear-0.4b": _kimi_linear(
            1024,
            20,
            heads=8,
            vocab_size=32768,
            intermediate_size=3584,
            first_k_dense_replace=20,
            num_experts=8,
            num_experts_per_token=2,
            moe_intermediate_size=1024,
        ),
    }
)
