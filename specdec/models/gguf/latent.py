"""Architectures with Kimi delta attention and latent attention: Kimi-Linear and Ling-3.0."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.models.gguf.architecture import NORMS, OUTER, Architecture, Transform, gated, log_decay
from specdec.models.gguf.dense import sigmoid_experts
from specdec.models.gguf.metadata import FULL, LINEAR, Metadata


def _mixers(home: str, *, full_rank: bool) -> dict[str, str]:
    """Return the names of both mixers' tensors."""
    gates = {f"ssm_{own}_{part}": f"{own}_{part}_proj" for own in "fg" for part in "ab"}
    if full_rank:
        gates = {"ssm_f_a": "f_proj", "ssm_g_a": "g_proj", "attn_gate": "g_proj"}
    names = {
        **{f"attn_{part}": f"{part}_proj" for part in "qkv"},
        **{f"ssm_conv1d_{part}": f"{part}_conv1d" for part in "qkv"},
        **gates,
        "ssm_beta": "b_proj",
        "ssm_a": "A_log",
        "ssm_dt.bias": "dt_bias",
        "ssm_norm": "o_norm",
        "attn_output": "o_proj",
        "attn_q_a": "q_a_proj",
        "attn_q_b": "q_b_proj",
        "attn_q_a_norm": "q_a_layernorm",
        "attn_kv_a_mqa": "kv_a_proj_with_mqa",
        "attn_kv_a_norm": "kv_a_layernorm",
        "attn_kv_b": "kv_b_proj",
        "attn_k_b": "k_b_proj",
        "attn_v_b": "v_b_proj",
    }
    return {name: f"{home}.{own}" for name, own in names.items()}


def _conv(metadata: Metadata, tensor_X: Tensor) -> Tensor:
    """Reshape one of three convolutions to [C, 1, K]."""
    return tensor_X.reshape(-1, 1, tensor_X.shape[-1])


def _transposed(metadata: Metadata, tensor_HRN: Tensor) -> Tensor:
    return tensor_HRN.transpose(1, 2) if tensor_HRN.dim() == 3 else tensor_HRN


_TRANSFORMS: Mapping[str, Transform] = {"conv1d.weight": _conv, "k_b_proj.weight": _transposed}


def _between_ones(metadata: Metadata, tensor_X: Tensor) -> Tensor:
    return log_decay(metadata, tensor_X).reshape(1, 1, -1, 1)


def _logarithm(metadata: Metadata, tensor_H1: Tensor) -> Tensor:
    """Return A_log, given A = exp(A_log)."""
    return torch.log(tensor_H1).reshape(-1)


def _cuts_none(metadata: Metadata, checkpoint_name: str) -> bool:
    """Return whether a matrix is two-dimensional in a checkpoint too."""
    return not checkpoint_name.endswith("kv_b_proj.weight")


def _latent(metadata: Metadata) -> dict[str, Any]:
    """Return the sizes of both mixers and of the experts."""
    shared = metadata.integer("rope.dimension_count")
    rank = metadata.integer("attention.q_lora_rank", default=0, least=0)
    own = metadata.integer("attention.key_length_mla", least=shared + 1) - shared
    return {
        "num_key_value_heads": metadata.heads,
        "head_dim": None,
        "layer_types": [FULL if heads else LINEAR for heads in metadata.kv_heads],
        "linear_num_heads": metadata.heads,
        "linear_head_dim": metadata.integer("kda.head_dim"),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "qk_rope_head_dim": shared,
        "qk_nope_head_dim": own,
        "v_head_dim": metadata.integer("attention.value_length_mla"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        **({"q_lora_rank": rank} if rank else {}),
        **sigmoid_experts(metadata),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", default=0, least=0),
        "num_shared_experts": metadata.integer("expert_shared_count", default=0, least=0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "moe_renormalize": metadata.flag("expert_weights_norm", default=True),
        "num_expert_group": metadata.integer("expert_group_count", default=1),
        "topk_group": metadata.integer("expert_group_used_count", default=1),
    }


def _ling(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Ling-3.0, with the activation limits of each layer's experts."""
    limits = {"swiglu_clamp_exp": "expert", "swiglu_clamp_shexp": "share_expert"}
    found = {f"{own}_swiglu_limit_list": metadata.numbers(name) for name, own in limits.items()}
    return {
        **_latent(metadata),
        "kda_safe_gate": metadata.flag("kda.safe_gate", default=True),
        "kda_lower_bound": metadata.number("kda.gate_lower_bound", -5.0),
        **{name: own for name, own in found.items() if own},
    }


def _sparse(home: str, correction: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {
        **gated("ffn_{}", "mlp.{}_proj"),
        "ffn_gate_inp": f"{home}.gate",
        "exp_probs_b.bias": f"{home}.gate.{correction}",
        **gated("ffn_{}_shexp", home + ".shared_experts.{}_proj"),
        **{f"ffn_{part}_exps": f"{home}.experts.{{e}}.{own}" for part, own in parts.items()},
    }


_W = {"gate": "w1", "down": "w2", "up": "w3"}
_PROJ = {part: f"{part}_proj" for part in _W}
_KIMI: Mapping[str, str] = {
    **NORMS,
    **_mixers("self_attn", full_rank=False),
    **_sparse("block_sparse_moe", "e_score_correction_bias", _W),
}
_LING: Mapping[str, str] = {
    **NORMS,
    **_mixers("attention", full_rank=True),
    "attn_output": "attention.dense",
    **_sparse("mlp", "expert_bias", _PROJ),
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "kimi-linear": Architecture(
        "kimi_linear", _KIMI, _latent, {**_TRANSFORMS, "A_log": _between_ones}, _cuts_none
    ),
    "bailingmoe3": Architecture(
        "bailing_hybrid",
        *(_LING, _ling, {**_TRANSFORMS, "A_log": _logarithm}, _cuts_none),
        outer=OUTER,
    ),
}
