"""The architecture with lightning attention: MiniMax-Text-01 and M1."""

from collections.abc import Mapping
from typing import Any

from specdec.models.gguf.architecture import ATTENTION, NORMS, Architecture
from specdec.models.gguf.metadata import FULL, LINEAR, Metadata

_W = {"gate": "w1", "down": "w2", "up": "w3"}
_NAMES: Mapping[str, str] = {
    **NORMS,
    **ATTENTION,
    "attn_qkv": "self_attn.qkv_proj",
    "attn_gate": "self_attn.output_gate",
    "attn_norm_2": "self_attn.norm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{e}}.{own}" for part, own in _W.items()},
}


def _minimax(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of MiniMax-01; all layers share one residual scale."""
    linear = [metadata.block_holds(i, "attn_norm_2") for i in range(metadata.layers)]
    scale = metadata.number("residual_scale", 1.0)
    return {
        "layer_types": [LINEAR if own else FULL for own in linear],
        "rotary_dim": metadata.integer("rope.dimension_count", default=metadata.head_dim),
        **{f"{half}_alpha_factor": scale for half in ("full_attn", "linear_attn", "mlp")},
        "num_local_experts": metadata.experts,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


ARCHITECTURES: Mapping[str, Architecture] = {"minimax-01": Architecture("minimax", _NAMES, _minimax)}
