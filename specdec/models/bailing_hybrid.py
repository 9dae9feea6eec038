"""Ling-3.0: five layers of Kimi delta attention per layer of gated latent attention, with grouped experts."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.models import kimi_linear, rules, spec
from specdec.models.blocks import (
    DENSE,
    FULL,
    LINEAR,
    MOST_LAYERS,
    SPARSE,
    assemble,
    feed_forwards,
    grouped_moe,
    layer_kinds,
    refuse_unsupported,
    rope_theta,
    swiglu,
)
from specdec.models.feed_forward import FeedForward
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules, rows
from specdec.models.mixers import KimiDeltaAttention, LatentAttention, Mixer
from specdec.models.norm import Norm
from specdec.models.rope import Rope

NAME = "bailing_hybrid"
MODEL_TYPES: tuple[str, ...] = ("bailing_hybrid",)
TITLES: Mapping[str, str] = {"bailing_hybrid": "Ling-3.0"}

HOMES = "attention", "self_attn"
"""A layer's mixer as published, and as named by the modules of transformers."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    _refuse_unsupported(fields)
    norm = Norm(fields.number("rms_norm_eps", default=1e-6), wide=False)
    mixers: dict[str, Mixer] = {LINEAR: _delta_attention(fields, norm.eps), FULL: _latent_attention(fields)}
    kinds, forwards = _kinds(fields), feed_forwards(fields, dense=2)
    parts = zip(kinds, _feed_forwards(fields, forwards), strict=True)
    layers = (spec.LayerSpec((mixers[kind],), ffn) for kind, ffn in parts)
    max_length = fields.integer("model_max_length", default=1 << 18)
    return assemble(NAME, fields, tuple(layers), norm, max_length=max_length)


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse unsupported options, spelled as in the published config or in transformers."""
    refuse_unsupported(fields)
    for name in fields.strings("architectures") or ():
        if "V2" in name:
            fields.refuse("architectures", "Ling-3.0: the models before it share its model_type alone")
    for name in ("attention_bias", "use_bias", "use_qkv_bias", "mlp_bias"):
        fields.absent(name, "projections without biases (false)")
    fields.absent("use_mla_nope", "latent attention with positions (false)")
    fields.absent("use_kda_lora", "gates of full rank (false)")
    fields.absent("use_nGPT", "layers that normalise what they read (false)")
    fields.absent("scale_router_input", "a router that reads what the experts read (false)")
    fields.absent("value_norm", "values that are not normalised (false)")
    fields.only("no_kda_lora", True)
    fields.only("rope_interleave", True)
    fields.only("gated_attention_proj_granularity_type", "head_wise")
    fields.only("group_norm_size", 1)
    fields.only("num_key_value_heads", fields.integer("num_attention_heads"))
    fields.only("num_kv_heads_for_linear_attn", 0, fields.integer("num_attention_heads"))
    fields.only("moe_router_enable_expert_bias", True)
    fields.only("moe_shared_expert_intermediate_size", fields.get("moe_intermediate_size"))
    fields.only("topk_method", "noaux_tc")
    fields.only("router_dtype", "fp32")
    for name in ("score_function", "scoring_func", "moe_router_activation_func"):
        fields.only(name, "sigmoid")
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        fields.only(name, 0, 1)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return each layer's mixer: from `layer_types`, else full attention in the last layer of each group."""
    size = fields.integer("layer_group_size", default=6)
    if "layer_types" not in fields and fields.integer("num_hidden_layers", most=MOST_LAYERS) % size:
        fields.refuse("layer_group_size", "layers in whole groups, or layer_types, which names each")
    return layer_kinds(fields, supported=(LINEAR, FULL), interval=size)


def _delta_attention(fields: Fields, eps: float) -> KimiDeltaAttention:
    """Read delta attention; in a re-saved config `head_dim` is the rotated width, not a head's size."""
    bound = fields.number("kda_lower_bound", default=-5.0)
    if bound >= 0:
        fields.refuse("kda_lower_bound", "a number below 0")
    return KimiDeltaAttention(
        heads=fields.integer("linear_num_heads", "num_attention_heads"),
        head_dim=fields.integer("linear_head_dim", "head_dim"),
        conv=fields.integer("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        eps=eps,
        gate_rank=None,
        bound=bound if fields.flag("kda_safe_gate", default=True) else None,
    )


def _latent_attention(fields: Fields) -> LatentAttention:
    """Read latent attention; it rotates all shared entries, regardless of `partial_rotary_factor`."""
    mixer = kimi_linear.latent_attention(fields)
    if mixer.shared_dim % 2:
        fields.refuse("qk_rope_head_dim", "an even number of rotated entries")
    fields.only("rotary_dim", mixer.shared_dim)
    return replace(mixer, rope=Rope(mixer.shared_dim, rope_theta(fields, default=6e6)), gated=True)


def _feed_forwards(fields: Fields, forwards: tuple[str, ...]) -> Iterator[FeedForward]:
    """Read each layer's feed-forward; experts have per-layer limits."""
    dense, experts = swiglu(fields), None
    if SPARSE in forwards:
        experts = grouped_moe(fields, groups=8, top_groups=4, scale=2.5)
    limits = (_limits(fields, f"{name}_swiglu_limit_list", forwards) for name in ("expert", "share_expert"))
    for kind, limit, shared in zip(forwards, *limits, strict=True):
        assert experts or kind == DENSE
        yield replace(experts, limit=limit, shared_limit=shared) if experts and kind == SPARSE else dense


def _limits(fields: Fields, name: str, forwards: tuple[str, ...]) -> tuple[float, ...]:
    """Read the activation limits of each layer's experts; 0 and null mean unlimited."""
    values = [None] * len(forwards) if fields.get(name) is None else fields.get(name)
    numbers = isinstance(values, list) and all(isinstance(value or 0, int | float) for value in values)
    if not numbers or len(values) < len(forwards) or any((value or 0) < 0 for value in values):
        fields.refuse(name, f"a number of at least 0 for each of {len(forwards)} layers")
    limits = tuple(float(value) if value else math.inf for value in values[: len(forwards)])
    if any(limit < math.inf and kind == DENSE for limit, kind in zip(limits, forwards, strict=True)):
        fields.refuse(name, "limits of layers with experts alone (0 in the others)")
    return limits


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout: as published, and with the module names of transformers.

    Layers after the last one are a multi-token head, which is not loaded.
    """
    return rules.table(
        network,
        TensorRule(r"embed\.weight", "~word_embeddings.weight"),
        *rules.OUTER,
        *rules.PRE_NORM,
        *(rule for home in HOMES for rule in _mixers(network, home)),
        *_feed_forward(),
        ignored=(rf"model\.layers\.{len(network.layers)}\..*",),
    )


def _mixers(network: spec.NetworkSpec, prefix: str) -> Iterator[TensorRule]:
    for mixer in set(network.mixers()):
        if isinstance(mixer, LatentAttention):
            yield from _rotated(mixer, prefix)
            yield from rules.latent_attention(prefix, mixer)
        elif isinstance(mixer, KimiDeltaAttention):
            yield from rules.delta_attention(prefix, mixer.width)
    yield from layer_rules(r"mixer\.gate\.weight", f"{prefix}.g_proj.weight")
    for name in ("dense", "o_proj"):
        yield from layer_rules(r"mixer\.(?:o|out)\.weight", f"{prefix}.{name}.weight")


def _rotated(mixer: LatentAttention, prefix: str) -> Iterator[TensorRule]:
    """Yield rules of the projections with rotated outputs, stored as adjacent pairs."""
    queries, rotated = (mixer.heads, mixer.own_dim), mixer.shared_dim
    for name, disk, (blocks, unrotated) in (
        ("q", "q_proj", queries),
        ("q_b", "q_b_proj", queries),
        ("kv_a", "kv_a_proj_with_mqa", (1, mixer.kv_rank)),
    ):
        recipe = rows(partial(_split_pairs, blocks, unrotated, rotated), blocks * (unrotated + rotated))
        yield from layer_rules(rf"mixer\.{name}\.weight", f"{prefix}.{disk}.weight", recipe=recipe)


def _split_pairs(blocks: int, unrotated: int, rotated: int) -> Tensor:
    """Return the row order that splits each block's trailing pairs: first halves, then second halves."""
    row = torch.arange(blocks * (unrotated + rotated)).view(blocks, -1)
    return torch.cat((row[:, :unrotated], row[:, unrotated::2], row[:, unrotated + 1 :: 2]), dim=1).flatten()


def _feed_forward() -> Iterator[TensorRule]:
    yield from rules.DENSE
    yield from rules.GATED_EXPERTS
    for name in ("expert_bias", "e_score_correction_bias"):
        yield from layer_rules(r"ffn\.router\.correction", f"mlp.gate.{name}")
    yield from layer_rules(r"ffn\.shared\.(gate|up|down)\.weight", r"mlp.shared_experts.\2_proj.weight")
