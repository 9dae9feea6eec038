"""Small networks with every kind of layer, to compare operations with their references anywhere."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from specdec.models import spec
from specdec.models.families import network
from specdec.models.shapes import SHAPES
from tools.kernels import attention_problems, token_problems, window_problems
from tools.kernels.problems import Bench, Planned, Sizes

_EXPERTS: Mapping[str, Any] = {
    **SHAPES["qwen3.5-35b-a3b"],
    "hidden_size": 64,
    "vocab_size": 257,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
_MAMBA: Mapping[str, Any] = {
    **SHAPES["nemotron-h-8b"],
    "hidden_size": 64,
    "vocab_size": 257,
    "hybrid_override_pattern": "M*-E",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
}
_SELECTIVE: Mapping[str, Any] = {
    **SHAPES["jamba-0.4b"],
    "hidden_size": 40,
    "vocab_size": 257,
    "num_hidden_layers": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "mamba_d_state": 5,
    "mamba_dt_rank": 3,
}
_KEY_DECAYS: Mapping[str, Any] = {
    **SHAPES["kimi-linear-0.4b"],
    "hidden_size": 64,
    "vocab_size": 257,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1],
        "head_dim": 24,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 24,
    "intermediate_size": 48,
    "first_k_dense_replace": 2,
}
_LIGHTNING: Mapping[str, Any] = {
    **SHAPES["minimax-text-01"],
    "hidden_size": 48,
    "vocab_size": 257,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "rotary_dim": 8,
    "intermediate_size": 24,
    "num_local_experts": 4,
}
_SHORT_CONV: Mapping[str, Any] = {
    **SHAPES["lfm2-350m"],
    "hidden_size": 72,
    "vocab_size": 257,
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "block_auto_adjust_ff_dim": False,
}
NETWORKS: Mapping[str, spec.NetworkSpec] = {
    "experts": network(_EXPERTS),
    "mamba": network(_MAMBA),
    "selective": network(_SELECTIVE),
    "key decays": network(_KEY_DECAYS),
    "lightning": network(_LIGHTNING),
    "short conv": network(_SHORT_CONV),
    "tiny": network(SHAPES["tiny"]),
}
PLANS = (token_problems.plan, window_problems.plan, attention_problems.plan)
LOADS = ((1, 1), (1, 2), (3, 5), (2, 16), (65, 1), (5, 63))
"""Batches and windows: single rows, odd sizes, and the widest draft windows."""
COLD = 1 << 16


def bench_of(kernels: str, device: torch.device, dtype: torch.dtype) -> Bench:
    """Return a bench with few buffer sets."""
    return Bench.of(kernels, device, dtype, cold_bytes=COLD)


def problems(
    bench: Bench, name: str, *, batch: int = 3, window: int = 5, of: spec.NetworkSpec | None = None
) -> Iterator[Planned]:
    """Yield the problems of a small network, or of the given one, at one load."""
    sizes = Sizes(name, of or NETWORKS[name], batch, window, context=17)
    for plan in PLANS:
        yield from plan(bench, sizes)
