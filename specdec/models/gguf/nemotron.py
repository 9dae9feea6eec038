"""Architectures with one mixer or one feed-forward per layer: Nemotron-H, dense and with experts."""

from collections.abc import Mapping
from typing import Any

from specdec.models.gguf.architecture import Architecture
from specdec.models.gguf.dense import sigmoid_experts
from specdec.models.gguf.mamba import BACKBONE, PAIRED_MAMBA2, mixer, sizes
from specdec.models.gguf.metadata import FULL, LINEAR, Metadata


def _nemotron(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Nemotron-H; a layer's kind follows from its tensors."""
    _, heads, head_dim = sizes(metadata)
    tensors = {"attn_q": FULL, "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    kinds = [
        next((kind for stem, kind in tensors.items() if metadata.block_holds(i, stem)), LINEAR)
        for i in range(metadata.layers)
    ]
    dense = f"blk.{kinds.index('mlp')}.ffn_up.weight" if "mlp" in kinds else None
    return {
        "layers_block_type": kinds,
        "num_hidden_layers": None,
        "layer_norm_epsilon": metadata.eps(),
        "rms_norm_eps": None,
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "n_groups": metadata.integer("ssm.group_count"),
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_conv_bias": metadata.holds("ssm_conv1d.bias"),
        "use_bias": metadata.holds("ssm_in.bias"),
        "mlp_bias": metadata.holds("ffn_up.bias"),
        **({"intermediate_size": metadata.entry(dense).shape[0]} if dense else {}),
        **(_experts(metadata) if "moe" in kinds else {}),
    }


def _experts(metadata: Metadata) -> dict[str, Any]:
    head = metadata.block_holds(metadata.layers, "nextn.eh_proj")
    latent = metadata.integer("moe_latent_size", default=0, least=0)
    return {
        **sigmoid_experts(metadata),
        "n_routed_experts": metadata.experts,
        "n_shared_experts": metadata.integer("expert_shared_count", default=1),
        "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": metadata.integer("expert_group_count", default=1),
        "topk_group": metadata.integer("expert_group_used_count", default=1),
        **({"moe_latent_size": latent} if latent else {}),
        "num_nextn_predict_layers": int(head),
        "mtp_layers_block_type": [FULL, "moe"],
    }


_ATTENTION = {f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"} | {"attn_output": "mixer.o_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    **{f"ffn_{part}_exps": f"mixer.experts.{{e}}.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NAMES: Mapping[str, str] = {
    "attn_norm": "norm",
    **mixer("mixer"),
    **_ATTENTION,
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **_EXPERTS,
}
_HEAD: Mapping[str, str] = {
    "nextn.eh_proj": "mtp.layers.0.eh_proj",
    "nextn.enorm": "mtp.layers.0.enorm",
    "nextn.hnorm": "mtp.layers.0.hnorm",
    "nextn.shared_head_norm": "mtp.layers.1.final_layernorm",
    "post_attention_norm": "mtp.layers.1.norm",
    **{name: f"mtp.layers.1.{own}" for name, own in _EXPERTS.items()},
}
"""The multi-token head: its attention and experts are two layers of a checkpoint, but one block of a file."""


ARCHITECTURES: Mapping[str, Architecture] = {
    **{
        name: Architecture(*("nemotron_h", _NAMES, _nemotron, PAIRED_MAMBA2), outer=BACKBONE, head=_HEAD)
        for name in ("nemotron_h", "nemotron_h_moe")
    },
}
