"""LFM2, dense and with experts: gated short convolutions and a few attention layers.

For LFM2-VL only the text model is loaded.
"""

from collections.abc import Mapping
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import (
    FULL,
    MOST_LAYERS,
    assemble,
    attention,
    layer_kinds,
    refuse_unsupported,
    text_fields,
    top_k,
)
from specdec.models.feed_forward import MLP, MoE
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules, squeeze_conv
from specdec.models.mixers import Mixer, ShortConv
from specdec.models.norm import Norm

NAME = "lfm2"
MODEL_TYPES: tuple[str, ...] = ("lfm2", "lfm2_moe", "lfm2_vl")
TITLES: Mapping[str, str] = {"lfm2": "LFM2", "lfm2_moe": "LFM2 MoE"}

CONV = "conv"
THETA = 1_000_000.0

NAMES = (
    TensorRule(r"norm\.weight", "~embedding_norm.weight"),
    *layer_rules(r"mixer_norm\.weight", "operator_norm.weight"),
    *layer_rules(r"ffn_norm\.weight", "ffn_norm.weight"),
    *layer_rules(r"mixer\.(in|out)\.(weight|bias)", r"conv.\2_proj.\3"),
    *layer_rules(r"mixer\.conv\.weight", "conv.conv.weight", recipe=squeeze_conv),
    *layer_rules(r"mixer\.conv\.bias", "conv.conv.bias"),
    *layer_rules(r"ffn\.gate\.weight", "feed_forward.w1.weight"),
    *layer_rules(r"ffn\.up\.weight", "feed_forward.w3.weight"),
    *layer_rules(r"ffn\.down\.weight", "feed_forward.w2.weight"),
)
"""Names common to all generations."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    outer = Fields(config)
    fields = text_fields(outer)
    for level in (outer, fields):
        refuse_unsupported(level)
    _refuse_unsupported(fields)
    norm = Norm(fields.number("norm_eps", default=1e-5), wide=False)
    kinds = _kinds(fields)
    mixers: dict[str, Mixer] = {CONV: short_conv(fields, taps=3)}
    if FULL in kinds:
        mixers[FULL] = attention(fields, norm=norm, theta=THETA)
    dense, experts = _dense(fields), None
    split = len(kinds)
    if fields.get("model_type") == "lfm2_moe":
        dense, experts = MLP(fields.integer("intermediate_size", default=7168), "swiglu"), _experts(fields)
        split = fields.integer("num_dense_layers", default=2, least=0)
    layers = (
        spec.LayerSpec((mixers[kind],), dense if i < split else experts) for i, kind in enumerate(kinds)
    )
    return assemble(NAME, outer, tuple(layers), norm, tied=True, max_length=128_000)


def _refuse_unsupported(fields: Fields) -> None:
    for name in ("attention_bias", "mlp_bias"):
        fields.absent(name, "projections without biases (false)")
    fields.only("block_use_swiglu", True)
    fields.only("use_pos_enc", True)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        fields.only(name, fields.integer("hidden_size"))


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return each layer's mixer: `layer_types`, else `full_attn_idxs`; without both, all attend."""
    if "layer_types" in fields or "full_attn_idxs" not in fields:
        return layer_kinds(fields, supported=(FULL, CONV))
    count, attend = fields.integer("num_hidden_layers", most=MOST_LAYERS), fields.integers("full_attn_idxs")
    if not set(attend) <= set(range(count)):
        fields.refuse("full_attn_idxs", f"numbers of layers, from 0 to {count - 1}")
    return tuple(FULL if i in attend else CONV for i in range(count))


def short_conv(fields: Fields, *, taps: int) -> ShortConv:
    """Read a short convolution of the hidden size."""
    return ShortConv(
        channels=fields.integer("hidden_size"),
        conv=fields.integer("conv_L_cache", default=taps),
        bias=fields.flag("conv_bias", default=False),
    )


def _dense(fields: Fields) -> MLP:
    """Read the dense feed-forward; by default its width is derived from two thirds of the config's."""
    width = fields.integer("block_ff_dim", "intermediate_size", default=12288)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return MLP(width, "swiglu")
    width = int(2 * width / 3)
    # A null multiplier leaves the width unchanged; an absent one is 1.
    if not fields.null("block_ffn_dim_multiplier"):
        multiple = fields.integer("block_multiple_of", default=256)
        width = int(fields.number("block_ffn_dim_multiplier", default=1.0) * width)
        width = -(-width // multiple) * multiple
    if width < 1:
        fields.refuse("intermediate_size", "a width of which something is left")
    return MLP(width, "swiglu")


def _experts(fields: Fields) -> MoE:
    return MoE(
        experts=fields.integer("num_experts"),
        top_k=top_k(fields, "num_experts"),
        width=fields.integer("moe_intermediate_size"),
        router="sigmoid",
        renormalise=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
        narrow_router=True,
        corrected=fields.flag("use_expert_bias", default=True),
        eps=1e-6,
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    return rules.table(
        network,
        *NAMES,
        *rules.OUTER,
        *layer_rules(r"mixer\.([qkv])\.weight", r"self_attn.\2_proj.weight"),
        *layer_rules(r"mixer\.o\.weight", "self_attn.out_proj.weight"),
        *layer_rules(r"mixer\.([qk])_norm\.weight", r"self_attn.\2_layernorm.weight"),
        *layer_rules(r"ffn\.router\.weight", "feed_forward.gate.weight"),
        *layer_rules(r"ffn\.router\.correction", "feed_forward.expert_bias"),
        *rules.experts("feed_forward", "w1", "w3", "w2"),
    )
