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
    }
)
