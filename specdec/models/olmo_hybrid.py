"""OLMo-Hybrid: pre-norm gated delta nets, and post-norm attention."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import (
    FULL,
    LINEAR,
    assemble,
    attention,
    layer_kinds,
    refuse_unsupported,
    rope_parameters,
    swiglu,
)
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, join_convs, layer_rules
from specdec.models.mixers import Attention, GatedDeltaNet
from specdec.models.norm import Norm

NAME = "olmo_hybrid"
MODEL_TYPES: tuple[str, ...] = ("olmo_hybrid",)
TITLES: Mapping[str, str] = {"olmo_hybrid": "OLMo-Hybrid"}

OUTPUT_EPS = 1e-5
"""Epsilon of the norm inside a gated delta net, independent of the config."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    norm = Norm(fields.number("rms_norm_eps"))
    kinds = layer_kinds(fields, supported=(FULL, LINEAR), interval=4)
    if "layer_types" not in fields and FULL not in kinds:
        kinds = (*kinds[:-1], FULL)
    ffn, post = swiglu(fields), spec.POST_NORM
    layers = {
        FULL: spec.LayerSpec((_attention(fields, norm),), ffn, frame=post, ffn_frame=post),
        LINEAR: spec.LayerSpec((_delta_net(fields),), ffn),
    }
    return assemble(NAME, fields, tuple(layers[kind] for kind in kinds), norm)


def _attention(fields: Fields, norm: Norm) -> Attention:
    """Read attention; a null rotary base means no positions."""
    if "rope_parameters" not in fields:
        fields.refuse(
            "rope_parameters", "an object whose rope_theta says whether there are positions (null: none)"
        )
    nested = rope_parameters(fields)
    level = nested if "rope_theta" in nested or nested.null("rope_theta") else fields
    rotates = not level.null("rope_theta")
    mixer = attention(fields, norm=norm, norm_whole=True, rotates=rotates, kv_heads_required=False)
    return replace(mixer, rope=replace(mixer.rope, wide=True)) if mixer.rope else mixer


def _delta_net(fields: Fields) -> GatedDeltaNet:
    heads = fields.integer("num_attention_heads")
    fields.divides("linear_num_key_heads", "linear_num_value_heads")
    key_heads = fields.integer("linear_num_key_heads", default=heads)
    key_dim = fields.integer(
        "linear_key_head_dim", default=int(0.75 * fields.integer("hidden_size") / key_heads)
    )
    return GatedDeltaNet(
        key_heads=key_heads,
        value_heads=fields.integer("linear_num_value_heads", default=heads),
        key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", default=2 * key_dim),
        conv=fields.integer("linear_conv_kernel_dim", default=4),
        eps=OUTPUT_EPS,
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0,
        apart=True,
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout; transformers renames some norms on saving."""
    return rules.table(
        network,
        *rules.OUTER,
        *layer_rules(r"mixer_norm\.weight", "attention_layer_norm.weight"),
        *layer_rules(r"mixer_norm\.weight", "input_layernorm.weight"),
        *layer_rules(r"ffn_norm\.weight", "feedforward_layer_norm.weight"),
        *layer_rules(r"ffn_norm\.weight", "post_attention_layernorm.weight"),
        *layer_rules(r"mixer_post_norm\.weight", "post_attention_layernorm.weight"),
        *layer_rules(r"mixer_post_norm\.weight", "feedforward_layer_norm.weight"),
        *layer_rules(r"ffn_post_norm\.weight", "post_feedforward_layernorm.weight"),
        *rules.ATTENTION,
        *rules.DENSE,
        *layer_rules(r"mixer\.in_([qkvab])\.weight", r"linear_attn.\2_proj.weight"),
        *layer_rules(r"mixer\.in_z\.weight", "linear_attn.g_proj.weight"),
        *layer_rules(r"mixer\.out\.weight", "linear_attn.o_proj.weight"),
        *layer_rules(r"mixer\.(A_log|dt_bias)", r"linear_attn.\2"),
        *layer_rules(r"mixer\.norm\.weight", "linear_attn.o_norm.weight"),
        *(rule for net in {*network.mixers()} if isinstance(net, GatedDeltaNet) for rule in _convs(net)),
        *rules.DELTA_NET,
    )


def _convs(net: GatedDeltaNet) -> Iterator[TensorRule]:
    key, value = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    names = (f"linear_attn.{name}_conv1d.weight" for name in "qkv")
    return layer_rules(r"mixer\.conv\.weight", *names, recipe=join_convs(key, key, value))
