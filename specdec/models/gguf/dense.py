"""Architectures with attention and a dense or sparse feed-forward in every layer."""

from collections.abc import Mapping
from typing import Any

from specdec.models.gguf.architecture import DENSE, UNPAIRED, Architecture, gated
from specdec.models.gguf.metadata import Metadata

GATED_EXPERTS: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    **gated("ffn_{}_exps", "mlp.experts.{{e}}.{}_proj"),
}


def experts(metadata: Metadata) -> dict[str, Any]:
    """Return the sizes of experts."""
    return {
        "num_experts": metadata.experts,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


SIGMOID = 2
"""llama.cpp's number of the router function."""


def sigmoid_experts(metadata: Metadata) -> dict[str, Any]:
    """Return the sizes of experts with a sigmoid router."""
    if metadata.integer("expert_gating_func", default=SIGMOID) != SIGMOID:
        metadata.refuse_value("expert_gating_func", f"{SIGMOID} (sigmoid)")
    return experts(metadata)


def dense_layers(metadata: Metadata) -> list[int]:
    """Return the layers without a router."""
    return [i for i in range(metadata.layers) if not metadata.block_holds(i, "ffn_gate_inp")]


def _biases(metadata: Metadata) -> dict[str, Any]:
    found = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
    return {**metadata.whole_heads(), **{name: True for name, own in found.items() if metadata.holds(own)}}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Qwen3 MoE. llama.cpp always renormalises the experts' weights."""
    return {
        **_biases(metadata),
        **experts(metadata),
        "norm_topk_prob": True,
        "mlp_only_layers": dense_layers(metadata),
    }


def _mistral(metadata: Metadata) -> dict[str, Any]:
    return {**metadata.whole_heads(), "sliding_window": None}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", DENSE, _biases, UNPAIRED),
    "qwen2": Architecture("qwen2", DENSE, Metadata.whole_heads),
    "qwen3": Architecture("qwen3", DENSE, _biases),
    "qwen3moe": Architecture("qwen3_moe", {**DENSE, **GATED_EXPERTS}, _qwen3_moe),
    "smollm3": Architecture("smollm3", DENSE, _biases, UNPAIRED),
    "mistral3": Architecture("mistral", DENSE, _mistral, UNPAIRED),
}
