"""Kimi-Linear: three layers of Kimi delta attention to one of latent attention, no positions, experts."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import FULL, LINEAR, MOST_LAYERS, assemble, layer_kinds, refuse_unsupported, swiglu
from specdec.models.feed_forward import MoE
from specdec.models.fields import Fields
from specdec.models.layouts import Layout, Rule, join_convs, layer_rules, squeeze_conv, stack, stored_as
from specdec.models.mixers import KimiDeltaAttention, LatentAttention, Mixer
from specdec.models.norm import Norm

NAME = "kimi_linear"
MODEL_TYPES: tuple[str, ...] = ("kimi_linear",)
TITLES: Mapping[str, str] = {"kimi_linear": "Kimi-Linear"}
HAS_MTP = False

FLAT = stored_as(lambda shape: (math.prod(shape),))
BY_HEAD = stored_as(lambda shape: (shape[0] * shape[1], shape[2]))
BETWEEN_ONES = stored_as(lambda shape: (1, 1, *shape, 1))
DENSE, SPARSE = "dense", "sparse"
LATENT_NORM = Norm(1e-6, wide=False)
"""Of what queries, keys and values are made of: its epsilon is no field."""


def network(config: Mapping[str, Any]) -> spec.Network:
    """Describe the network of a config."""
    fields = Fields(config)
    _refuse_unsupported(fields)
    norm = Norm(fields.number("rms_norm_eps", default=1e-5), wide=False)
    kinds, forwards = _kinds(fields), _forwards(fields)
    mixers: dict[str, Mixer] = {LINEAR: _delta_attention(fields, norm.eps), FULL: _latent_attention(fields)}
    parts = {DENSE: swiglu(fields), SPARSE: _experts(fields) if SPARSE in forwards else None}
    layers = (spec.Layer((mixers[kind],), parts[own]) for kind, own in zip(kinds, forwards, strict=True))
    most = fields.integer("model_max_length", default=1 << 20)
    return assemble(NAME, fields, tuple(layers), norm, max_length=most)


def _refuse_unsupported(fields: Fields) -> None:
    refuse_unsupported(fields)
    fields.absent("attention_bias", "attention without biases (false)")
    fields.only("mla_use_nope", True)
    fields.only("moe_router_activation_func", "sigmoid")
    fields.only("moe_layer_freq", 1)
    fields.only("use_grouped_topk", True)
    fields.only("num_nextn_predict_layers", 0)
    fields.only("num_key_value_heads", fields.integer("num_attention_heads"))


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Name each layer's mixer: `layer_types`, or the lists of `linear_attn_config`, which count from 1."""
    nested = fields.within("linear_attn_config")
    if "layer_types" in fields:
        return layer_kinds(fields, supported=(LINEAR, FULL))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    attend, others = nested.integers("full_attn_layers"), nested.integers("kda_layers")
    if sorted((*attend, *others)) != list(range(1, count + 1)):
        nested.refuse("full_attn_layers", f"each layer from 1 to {count} once, here or in kda_layers")
    return tuple(FULL if i + 1 in attend else LINEAR for i in range(count))


def _forwards(fields: Fields) -> tuple[str, ...]:
    """Name each layer's feed-forward: `mlp_layer_types`, or else experts behind the first few."""
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    found = fields.strings("mlp_layer_types")
    if found is None:
        dense = fields.integer("first_k_dense_replace", default=1, least=0)
        return tuple(DENSE if i < dense else SPARSE for i in range(count))
    if len(found) != count or not set(found) <= {DENSE, SPARSE}:
        fields.refuse("mlp_layer_types", f"{DENSE} or {SPARSE} for each of {count} layers")
    return found


def _delta_attention(fields: Fields, eps: float) -> KimiDeltaAttention:
    nested = fields.within("linear_attn_config")

    def size(own: str, published: str, default: int) -> int:
        return nested.integer(published, default=fields.integer(own, default=default))

    head_dim = size("linear_head_dim", "head_dim", 128)
    return KimiDeltaAttention(
        heads=size("linear_num_heads", "num_heads", 32),
        head_dim=head_dim,
        conv=size("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
        eps=eps,
        gate_rank=head_dim,
    )


def _latent_attention(fields: Fields) -> LatentAttention:
    return LatentAttention(
        heads=fields.integer("num_attention_heads"),
        own_dim=fields.integer("qk_nope_head_dim"),
        shared_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        kv_rank=fields.integer("kv_lora_rank"),
        q_rank=fields.integer("q_lora_rank") if "q_lora_rank" in fields else None,
        norm=LATENT_NORM,
    )


def _experts(fields: Fields) -> MoE:
    """Read experts, of which a token visits some of a few groups, beside those that all tokens visit."""
    experts = fields.integer("num_experts")
    groups = fields.integer("num_expert_group", "n_group", default=1)
    top_groups = fields.integer("topk_group", default=1)
    visited = fields.integer("num_experts_per_token", "num_experts_per_tok")
    spelling = "n_group" if "num_expert_group" not in fields and "n_group" in fields else "num_expert_group"
    if experts % groups or experts // groups < 2:
        fields.refuse(spelling, f"groups of two experts at least that share num_experts ({experts}) evenly")
    if top_groups > groups:
        fields.refuse("topk_group", f"no more groups than there are ({groups})")
    if visited > experts // groups * top_groups:
        name = "num_experts_per_token" if "num_experts_per_token" in fields else "num_experts_per_tok"
        fields.refuse(name, "no more experts than the chosen groups (topk_group) hold")
    width = fields.integer("moe_intermediate_size")
    return MoE(
        experts=experts,
        top_k=visited,
        width=width,
        activation="swiglu",
        router="sigmoid",
        renormalise=fields.flag("moe_renormalize", "norm_topk_prob", default=True),
        shared_width=width * fields.integer("num_shared_experts", "n_shared_experts", default=1, least=0),
        shared_gate=False,
        scale=fields.number("routed_scaling_factor", default=2.446),
        groups=groups,
        top_groups=top_groups,
    )


def layout(network: spec.Network) -> Layout:
    """Say where the tensors lie: as published, as transformers saves them, and as its modules name them."""
    nets = {mixer for mixer in network.mixers() if isinstance(mixer, KimiDeltaAttention)}
    return Layout(
        rules=(
            *rules.OUTER,
            *rules.PRE_NORM,
            *rules.ATTENTION,
            *(rule for net in nets for rule in _convs(net)),
            *_mixers(),
            *(rule for home in ("block_sparse_moe", "mlp") for rule in _feed_forward(home)),
        ),
        prefixes=rules.PREFIXES,
        embedding="embed_tokens.weight",
        ignored=rules.ignored(network),
    )


def _convs(net: KimiDeltaAttention) -> Iterator[Rule]:
    names = (f"self_attn.{name}_conv1d.weight" for name in "qkv")
    yield from layer_rules(r"mixer\.conv\.weight", *names, recipe=join_convs(*[net.width] * 3))
    yield from layer_rules(r"mixer\.conv\.weight", "self_attn.conv1d.weight", recipe=squeeze_conv)


def _mixers() -> Iterator[Rule]:
    yield from layer_rules(r"mixer\.in_([qkvb])\.weight", r"self_attn.\2_proj.weight")
    yield from layer_rules(r"mixer\.in_z_([ab])\.weight", r"self_attn.g_\2_proj.weight")
    yield from layer_rules(r"mixer\.norm\.weight", "self_attn.o_norm.weight")
    yield from layer_rules(r"mixer\.out\.weight", "self_attn.o_proj.weight")
    for home in ("self_attn", "self_attn.forget_gate"):
        yield from layer_rules(r"mixer\.in_a_([ab])\.weight", rf"{home}.f_\2_proj.weight")
        yield from layer_rules(r"mixer\.dt_bias", f"{home}.dt_bias", recipe=FLAT)
        yield from layer_rules(r"mixer\.A_log", f"{home}.A_log", recipe=BETWEEN_ONES)
    yield from layer_rules(r"mixer\.kv_a\.weight", "self_attn.kv_a_proj_with_mqa.weight")
    yield from layer_rules(r"mixer\.(q_a|q_b)\.weight", r"self_attn.\2_proj.weight")
    yield from layer_rules(r"mixer\.kv_b\.weight", "self_attn.kv_b_proj.weight", recipe=BY_HEAD)
    yield from layer_rules(r"mixer\.(q|kv)_norm\.weight", r"self_attn.\2_a_layernorm.weight")


def _feed_forward(home: str) -> Iterator[Rule]:
    yield from layer_rules(r"ffn\.(gate|up|down)\.weight", rf"{home}.\2_proj.weight")
    yield from layer_rules(r"ffn\.router\.weight", f"{home}.gate.weight")
    yield from layer_rules(r"ffn\.router\.correction", f"{home}.gate.e_score_correction_bias")
    yield from layer_rules(r"ffn\.experts\.up", f"{home}.experts.gate_up_proj")
    yield from layer_rules(r"ffn\.experts\.down", f"{home}.experts.down_proj")
    each = f"{home}.experts.{{e}}"
    yield from layer_rules(r"ffn\.experts\.up", f"{each}.w1.weight", f"{each}.w3.weight", recipe=stack)
    yield from layer_rules(r"ffn\.experts\.down", f"{each}.w2.weight", recipe=stack)
    yield from layer_rules(r"ffn\.shared\.(gate|up|down)\.weight", rf"{home}.shared_experts.\2_proj.weight")
