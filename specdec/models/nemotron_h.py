"""Nemotron-H: each layer is one pre-norm sublayer: Mamba-2, attention, dense or mixture of experts."""

import math
from collections.abc import Mapping
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import (
    FULL,
    LINEAR,
    assemble,
    head_wanted,
    kv_heads,
    modern_kinds,
    refuse_unsupported,
    text_fields,
    top_k,
)
from specdec.models.feed_forward import MLP, MoE
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules, squeeze_conv, stack
from specdec.models.mixers import Attention, Mamba2
from specdec.models.norm import Norm

NAME = "nemotron_h"
MODEL_TYPES: tuple[str, ...] = ("nemotron_h", "nemotron_h_omni")
TITLES: Mapping[str, str] = {"nemotron_h": "Nemotron-H"}

_SYMBOLS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    outer = Fields(config)
    fields = text_fields(outer)
    refuse_unsupported(outer)
    _refuse_unsupported(fields)
    norm = Norm(fields.number("layer_norm_epsilon", default=1e-5))
    kinds = _kinds(fields, "layers_block_type", "hybrid_override_pattern", "layer_types")
    if kinds is None:
        fields.refuse("layers_block_type", "it, or hybrid_override_pattern, to say what each layer is")
    if not {LINEAR, FULL} & set(kinds):
        name = next(n for n in ("layers_block_type", "hybrid_override_pattern", "layer_types") if n in fields)
        fields.refuse(name, "at least one layer of attention or Mamba-2")
    mtp: tuple[str, ...] = ()
    if head_wanted(fields, default=False):
        mtp = _kinds(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or (FULL, "moe")
        if LINEAR in mtp:
            fields.refuse("mtp_layers_block_type", "a multi-token head without recurrent layers")
    layers = {kind: _layer(fields, kind, norm.eps) for kind in {*kinds, *mtp}}
    return assemble(NAME, outer, tuple(layers[k] for k in kinds), norm, mtp=tuple(layers[k] for k in mtp))


def _refuse_unsupported(fields: Fields) -> None:
    refuse_unsupported(fields)
    fields.absent("tie_word_embeddings", "an output head of its own (false)")
    fields.absent("residual_in_fp32", "residuals in the model's type (false)")
    fields.absent("attention_bias", "attention without biases (false)")
    fields.absent("sliding_window", "full attention (null)")
    fields.absent("block_configs", "layers of one size, without block_configs")
    fields.only("mlp_hidden_act", "relu2")
    fields.only("mamba_hidden_act", "silu")
    for name in ("time_step_limit", "mamba_dt_limit"):
        fields.only(name, [0.0, math.inf], (0.0, math.inf))


def _kinds(fields: Fields, *names: str) -> tuple[str, ...] | None:
    """Read the kinds of layers from a list or a pattern of symbols."""
    name = next((name for name in names if name in fields), None)
    if name is None:
        return None
    value = fields.get(name)
    kinds = tuple(_SYMBOLS.get(s, s) for s in value) if isinstance(value, str) else fields.strings(name)
    kinds = modern_kinds(kinds or ())
    if not kinds or not set(kinds) <= set(_SYMBOLS.values()):
        fields.refuse(name, f"a pattern of {' '.join(_SYMBOLS)}, or a list of {', '.join(_SYMBOLS.values())}")
    return kinds


def _layer(fields: Fields, kind: str, eps: float) -> spec.LayerSpec:
    if kind == LINEAR:
        return spec.LayerSpec((_mamba(fields, eps),), None)
    if kind == FULL:
        return spec.LayerSpec((_attention(fields),), None)
    return spec.LayerSpec((), _dense(fields) if kind == "mlp" else _experts(fields))


def _attention(fields: Fields) -> Attention:
    """Read attention, which has no position encoding."""
    fields.divides("num_key_value_heads", "num_attention_heads")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", "attention_head_dim", default=128)
    return Attention(
        heads,
        kv_heads(fields, heads, required=True),
        head_dim,
        head_dim**-0.5,
        rope=None,
        qk_norm=None,
        gated=False,
    )


def _mamba(fields: Fields, eps: float) -> Mamba2:
    heads, groups = fields.integer("mamba_num_heads"), fields.integer("n_groups", "mamba_n_groups", default=8)
    if heads % groups:
        fields.refuse("mamba_num_heads", f"a multiple of n_groups ({groups})")
    # The reference bounds the step from below in prefill but not in decode. We bound it in both: a token's
    # step must not depend on its window.
    min_step = fields.number("time_step_min", "mamba_dt_min", default=1e-3)
    return Mamba2(
        heads=heads,
        head_dim=fields.integer("mamba_head_dim"),
        groups=groups,
        state_dim=fields.integer("ssm_state_size"),
        conv=fields.integer("conv_kernel", "mamba_d_conv", default=4),
        conv_bias=fields.flag("use_conv_bias", "mamba_conv_bias", default=True),
        bias=fields.flag("use_bias", default=False),
        eps=eps,
        step_limit=(min_step, math.inf),
    )


def _dense(fields: Fields) -> MLP:
    return MLP(fields.integer("intermediate_size"), "relu2", bias=fields.flag("mlp_bias", default=False))


def _experts(fields: Fields) -> MoE:
    fields.absent("mlp_bias", "experts without biases (false)")
    fields.only("n_shared_experts", 1)
    fields.divides("n_group", "n_routed_experts")
    experts, groups = fields.integer("n_routed_experts"), fields.integer("n_group", default=1)
    if experts // groups < 2:
        fields.refuse("n_group", "at least two experts in a group")
    if fields.integer("topk_group", default=1) > groups:
        fields.refuse("topk_group", f"no more groups than there are ({groups})")
    if top_k(fields, "n_routed_experts") > experts // groups * fields.integer("topk_group", default=1):
        fields.refuse("num_experts_per_tok", "no more experts than the chosen groups (topk_group) hold")
    return MoE(
        experts=fields.integer("n_routed_experts"),
        top_k=top_k(fields, "n_routed_experts"),
        width=fields.integer("moe_intermediate_size"),
        activation="relu2",
        router="sigmoid",
        renormalise=fields.flag("norm_topk_prob", default=True),
        shared_width=fields.integer("moe_shared_expert_intermediate_size"),
        scale=fields.number("routed_scaling_factor", default=1.0),
        groups=fields.integer("n_group", default=1),
        top_groups=fields.integer("topk_group", default=1),
        latent=fields.integer("moe_latent_size") if "moe_latent_size" in fields else None,
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    last = len(network.mtp) - 1
    return CheckpointLayout(
        rules=(
            TensorRule(r"embed\.weight", "~embeddings.weight"),
            TensorRule(r"norm\.weight", "~norm_f.weight"),
            TensorRule(r"head\.weight", "lm_head.weight"),
            TensorRule(r"head\.weight", "language_model.lm_head.weight"),
            *layer_rules(r"(?:mixer|ffn)_norm\.weight", "norm.weight"),
            *layer_rules(r"mixer\.([qkvo])\.weight", r"mixer.\2_proj.weight"),
            *layer_rules(r"mixer\.(in|out)\.(weight|bias)", r"mixer.\2_proj.\3"),
            *layer_rules(r"mixer\.conv\.weight", "mixer.conv1d.weight", recipe=squeeze_conv),
            *layer_rules(r"mixer\.conv\.bias", "mixer.conv1d.bias"),
            *layer_rules(r"mixer\.(A_log|D|dt_bias|norm\.weight)", r"mixer.\2"),
            *layer_rules(r"ffn\.(up|down)\.(weight|bias)", r"mixer.\2_proj.\3"),
            *layer_rules(r"ffn\.router\.weight", "mixer.gate.weight"),
            *layer_rules(r"ffn\.router\.correction", "mixer.gate.e_score_correction_bias"),
            *layer_rules(r"ffn\.experts\.(up|down)", r"mixer.experts.\2_proj"),
            *layer_rules(r"ffn\.experts\.(up|down)", r"mixer.experts.{e}.\2_proj.weight", recipe=stack),
            *layer_rules(r"ffn\.shared\.(up|down)\.weight", r"mixer.shared_experts.\2_proj.weight"),
            *layer_rules(r"ffn\.latent_in\.weight", "mixer.fc1_latent_proj.weight"),
            *layer_rules(r"ffn\.latent_out\.weight", "mixer.fc2_latent_proj.weight"),
            TensorRule(r"mtp\.embed_norm\.weight", "mtp.layers.0.enorm.weight"),
            TensorRule(r"mtp\.hidden_norm\.weight", "mtp.layers.0.hnorm.weight"),
            TensorRule(r"mtp\.fc\.weight", "mtp.layers.0.eh_proj.weight"),
            TensorRule(r"mtp\.norm\.weight", f"mtp.layers.{last}.final_layernorm.weight"),
        ),
        prefixes=("backbone.", "model.", "language_model.backbone.", ""),
        embedding="embeddings.weight",
        ignored=rules.always_ignored(network),
    )
