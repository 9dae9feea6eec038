"""Architectures with Mamba layers: Granite 4, Falcon-H1, Jamba, Mamba and Mamba-2."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from specdec.models.gguf.architecture import (
    ATTENTION,
    DENSE,
    OUTER,
    UNPAIRED,
    Architecture,
    Transform,
    as_depthwise,
    flatten,
    gated,
    log_decay,
)
from specdec.models.gguf.metadata import FULL, LINEAR, Metadata


def mixer(home: str) -> dict[str, str]:
    """Return the names of Mamba-2's tensors, some of which Mamba-1 shares."""
    return {
        "ssm_in": f"{home}.in_proj",
        "ssm_conv1d": f"{home}.conv1d",
        "ssm_a": f"{home}.A_log",
        "ssm_d": f"{home}.D",
        "ssm_dt.bias": f"{home}.dt_bias",
        "ssm_norm": f"{home}.norm",
        "ssm_out": f"{home}.out_proj",
    }


def _first_mixer(home: str) -> dict[str, str]:
    steps = {"ssm_x": f"{home}.x_proj", "ssm_dt": f"{home}.dt_proj", "ssm_dt.bias": f"{home}.dt_proj.bias"}
    return {**mixer(home), **steps}


def _log_decay_by_head(metadata: Metadata, tensor_H1: Tensor) -> Tensor:
    return flatten(metadata, log_decay(metadata, tensor_H1))


_MAMBA1: Mapping[str, Transform] = {"conv1d.weight": as_depthwise, "A_log": log_decay}
MAMBA2: Mapping[str, Transform] = {
    "conv1d.weight": as_depthwise,
    "A_log": _log_decay_by_head,
    ".D": flatten,
    "mamba.norm.weight": flatten,
    "mixer.norm.weight": flatten,
}
PAIRED_MAMBA2 = {**UNPAIRED, **MAMBA2}


def sizes(metadata: Metadata) -> tuple[int, int, int]:
    """Return Mamba-2's inner width, heads, and head size."""
    inner, heads = metadata.integer("ssm.inner_size"), metadata.integer("ssm.time_step_rank")
    if inner % heads:
        metadata.refuse_value("ssm.inner_size", f"a multiple of ssm.time_step_rank ({heads})")
    return inner, heads, inner // heads


def _expanded(metadata: Metadata) -> int:
    """Return the ratio of the mixer's inner width to the hidden size."""
    inner = metadata.integer("ssm.inner_size")
    if inner % metadata.hidden:
        metadata.refuse_value("ssm.inner_size", f"a multiple of embedding_length ({metadata.hidden})")
    return inner // metadata.hidden


def _mamba2(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Mamba-2 as Granite and Falcon-H1 name them."""
    _, heads, head_dim = sizes(metadata)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": metadata.integer("ssm.group_count", default=1),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.holds("ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.holds("ssm_in.bias"),
    }


def _granite(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Granite 4, or of Granite 3, which has only attention layers."""
    recurrent = not all(metadata.kv_heads)
    rotates = metadata.flag("rope.scaling.finetuned", default=True)
    if rotates and recurrent:
        metadata.refuse_value(
            "rope.scaling.finetuned", "false: Mamba layers beside attention without positions"
        )
    experts, dense = metadata.experts, metadata.integer("feed_forward_length")
    shared = metadata.integer("expert_shared_feed_forward_length", default=0 if experts else dense, least=0)
    return {
        **(metadata.whole_heads() if rotates else {}),
        **({**_mamba2(metadata), "mamba_expand": _expanded(metadata)} if recurrent else {}),
        "layer_types": [FULL if heads else LINEAR for heads in metadata.kv_heads],
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_bias": metadata.holds("attn_q.bias"),
        "shared_intermediate_size": shared,
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.integer("expert_used_count", default=0, least=0),
        "attention_multiplier": metadata.number("attention.scale", 0) or metadata.head_dim**-0.5,
        "embedding_multiplier": metadata.number("embedding_scale", 0) or 1.0,
        "residual_multiplier": metadata.number("residual_scale", 0) or 1.0,
        "logits_scaling": metadata.number("logit_scale", 0) or 1.0,
    }


def _falcon(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Falcon-H1. The weights include its multipliers, so a tied output is refused."""
    metadata.entry("output.weight")
    return {
        **metadata.whole_heads(),
        **_mamba2(metadata),
        "mamba_d_ssm": metadata.integer("ssm.inner_size"),
        "mamba_rms_norm": metadata.holds("ssm_norm"),
        "mamba_norm_before_gate": False,
    }


def _jamba(metadata: Metadata) -> dict[str, Any]:
    routed = [i for i in range(metadata.layers) if metadata.block_holds(i, "ffn_gate_inp")]
    attends = [i for i, heads in enumerate(metadata.kv_heads) if heads]
    return {
        **_every("attn", attends, metadata, "attention.head_count_kv"),
        **_every("expert", routed, metadata, "expert_count"),
        "num_experts": metadata.experts or 1,
        "num_experts_per_tok": metadata.integer("expert_used_count", default=1),
        "mamba_expand": _expanded(metadata),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_dt_rank": metadata.integer("ssm.time_step_rank"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.holds("ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.holds("ssm_in.bias"),
    }


def _every(kind: str, layers: Sequence[int], metadata: Metadata, name: str) -> dict[str, int]:
    """Return the period and offset of some layers; Jamba's config cannot list them."""
    offset = layers[0] if layers else metadata.layers
    what = {"attn": "attention", "expert": "experts"}[kind]
    period = layers[1] - offset if len(layers) > 1 else metadata.layers + 1
    if list(range(offset, metadata.layers, period)) != list(layers) or offset >= period:
        metadata.refuse(
            f"{metadata.name}.{name}", f"the layers with {what}, {list(layers)}, are not evenly spaced"
        )
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}


def _pure(metadata: Metadata) -> dict[str, Any]:
    """Return the fields that Mamba and Mamba-2 share."""
    return {
        "state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_conv_bias": metadata.holds("ssm_conv1d.bias"),
        "use_bias": metadata.holds("ssm_in.bias"),
        "layer_norm_epsilon": metadata.eps(),
        "rms_norm_eps": None,
    }


def _first(metadata: Metadata) -> dict[str, Any]:
    falcon = metadata.flag("ssm.dt_b_c_rms", default=False)
    return {
        **_pure(metadata),
        **({"model_type": "falcon_mamba"} if falcon else {}),
        "intermediate_size": metadata.integer("ssm.inner_size"),
        "time_step_rank": metadata.integer("ssm.time_step_rank"),
    }


def _second(metadata: Metadata) -> dict[str, Any]:
    _, heads, head_dim = sizes(metadata)
    return {
        **_pure(metadata),
        "expand": _expanded(metadata),
        "num_heads": heads,
        "head_dim": head_dim,
        "n_groups": metadata.integer("ssm.group_count", default=1),
    }


_GRANITE: Mapping[str, str] = {
    **DENSE,
    **mixer("mamba"),
    **gated("ffn_{}", "shared_mlp.{}_proj"),
    **gated("ffn_{}_shexp", "shared_mlp.{}_proj"),
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **gated("ffn_{}_exps", "block_sparse_moe.experts.{{e}}.{}_proj"),
}
_PRE_FF: Mapping[str, str] = {
    **ATTENTION,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    **gated("ffn_{}", "feed_forward.{}_proj"),
}
_JAMBA: Mapping[str, str] = {
    **_PRE_FF,
    **_first_mixer("mamba"),
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    "ffn_gate_inp": "feed_forward.router",
    **gated("ffn_{}_exps", "feed_forward.experts.{{e}}.{}_proj"),
}


def outer(norm: str, embedding: str = "embed_tokens") -> dict[str, str]:
    return {
        **OUTER,
        "output_norm.weight": f"model.{norm}.weight",
        "token_embd.weight": f"model.{embedding}.weight",
    }


BACKBONE = outer("norm_f", "embeddings")
_FINAL = outer("final_layernorm")
_PURE_NAMES: Mapping[str, str] = {"attn_norm": "norm", **mixer("mixer")}

ARCHITECTURES: Mapping[str, Architecture] = {
    **{
        name: Architecture("granitemoehybrid", _GRANITE, _granite, PAIRED_MAMBA2)
        for name in ("granitehybrid", "granite", "granitemoe")
    },
    "falcon-h1": Architecture("falcon_h1", {**_PRE_FF, **mixer("mamba")}, _falcon, MAMBA2, outer=_FINAL),
    "jamba": Architecture("jamba", _JAMBA, _jamba, _MAMBA1, outer=_FINAL),
    "mamba": Architecture(
        "mamba", {"attn_norm": "norm", **_first_mixer("mixer")}, _first, _MAMBA1, outer=BACKBONE
    ),
    "mamba2": Architecture("mamba2", _PURE_NAMES, _second, MAMBA2, outer=BACKBONE),
}
