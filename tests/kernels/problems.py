"""Small networks with every kind of layer, whose operations are compared with their references anywhere."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from specdec.bench import attention_problems, token_problems, window_problems
from specdec.bench.problems import Bench, Planned, Sizes
from specdec.models import spec
from specdec.models.families import network
from specdec.models.shapes import SHAPES

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
NETWORKS: Mapping[str, spec.Network] = {
    "experts": network(_EXPERTS),
    "mamba": network(_MAMBA),
    "tiny": network(SHAPES["tiny"]),
}
PLANS = (token_problems.plan, window_problems.plan, attention_problems.plan)
LOADS = ((1, 1), (1, 2), (3, 5), (2, 16), (65, 1), (5, 63))
"""Batches and windows: single rows, odd ones, and the widest windows that drafts have."""
COLD = 1 << 16


def bench_of(kernels: str, device: torch.device, dtype: torch.dtype) -> Bench:
    """Work on few sets of buffers."""
    return Bench.of(kernels, device, dtype, cold_bytes=COLD)


def problems(
    bench: Bench, name: str, *, batch: int = 3, window: int = 5, of: spec.Network | None = None
) -> Iterator[Planned]:
    """List the problems of a small network, or of one that is given, at one load."""
    sizes = Sizes(name, of or NETWORKS[name], batch, window, context=17)
    for plan in PLANS:
        yield from plan(bench, sizes)
