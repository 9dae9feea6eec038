"""Architectures with short convolutions: LFM2, dense and with experts."""

from collections.abc import Mapping
from typing import Any

from specdec.models.gguf.architecture import ATTENTION, OUTER, Architecture, as_depthwise
from specdec.models.gguf.dense import sigmoid_experts
from specdec.models.gguf.metadata import CONV, FULL, Metadata

_W = {"gate": "w1", "down": "w2", "up": "w3"}
_NAMES: Mapping[str, str] = {
    **ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")},
    **{f"ffn_{part}": f"feed_forward.{own}" for part, own in _W.items()},
}
_SPARSE: Mapping[str, str] = {
    **_NAMES,
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **{f"ffn_{part}_exps": f"feed_forward.experts.{{e}}.{own}" for part, own in _W.items()},
}
_OUTER = {**OUTER, "token_embd_norm.weight": "model.embedding_norm.weight"}


def _layers(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of LFM2; layers without key heads are convolutions."""
    return {
        **metadata.whole_heads(),
        "layer_types": [FULL if heads else CONV for heads in metadata.kv_heads],
        "norm_eps": metadata.eps(),
        "rms_norm_eps": None,
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _with_experts(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of LFM2 MoE. llama.cpp always renormalises the experts' weights."""
    return {
        **_layers(metadata),
        **sigmoid_experts(metadata),
        "num_dense_layers": metadata.integer("leading_dense_block_count", default=0, least=0),
        "norm_topk_prob": True,
        "use_expert_bias": metadata.holds("exp_probs_b.bias"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


_CONV = {"conv.conv.weight": as_depthwise}
ARCHITECTURES: Mapping[str, Architecture] = {
    "lfm2": Architecture("lfm2", _NAMES, _layers, _CONV, outer=_OUTER),
    "lfm2moe": Architecture("lfm2_moe", _SPARSE, _with_experts, _CONV, outer=_OUTER),
}
