"""Kimi-Linear: three layers of Kimi delta attention per layer of latent attention, no positions, experts."""

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.models import rules, spec
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
    swiglu,
)
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules
from specdec.models.mixers import KimiDeltaAttention, LatentAttention, Mixer
from specdec.models.norm import Norm

NAME = "kimi_linear"
MODEL_TYPES: tuple[str, ...] = ("kimi_linear",)
TITLES: Mapping[str, str] = {"kimi_linear": "Kimi-Linear"}

LATENT_NORM = Norm(1e-6, wide=False)
"""Norm of the latent vectors; its epsilon is not in the config."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    _refuse_unsupported(fields)
    norm = Norm(fields.number("rms_norm_eps", default=1e-5), wide=False)
    kinds, forwards = _kinds(fields), feed_forwards(fields, dense=1)
    mixers: dict[str, Mixer] = {LINEAR: _delta_attention(fields, norm.eps), FULL: latent_attention(fields)}
    parts = {DENSE: swiglu(fields), SPARSE: grouped_moe(fields, scale=2.446) if SPARSE in forwards else None}
    layers = (spec.LayerSpec((mixers[kind],), parts[own]) for kind, own in zip(kinds, forwards, strict=True))
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
    """Return each layer's mixer: from `layer_types`, or the 1-based lists of `linear_attn_config`."""
    nested = fields.within("linear_attn_config")
    if "layer_types" in fields:
        return layer_kinds(fields, supported=(LINEAR, FULL))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    attend, others = nested.integers("full_attn_layers"), nested.integers("kda_layers")
    if sorted((*attend, *others)) != list(range(1, count + 1)):
        nested.refuse("full_attn_layers", f"each layer from 1 to {count} once, here or in kda_layers")
    return tuple(FULL if i + 1 in attend else LINEAR for i in range(count))


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


def latent_attention(fields: Fields) -> LatentAttention:
    """Read latent attention without positions."""
    return LatentAttention(
        heads=fields.integer("num_attention_heads"),
        own_dim=fields.integer("qk_nope_head_dim"),
        shared_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        kv_rank=fields.integer("kv_lora_rank"),
        q_rank=fields.integer("q_lora_rank") if "q_lora_rank" in fields else None,
        norm=LATENT_NORM,
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout: as published, as saved by transformers, and with its module names."""
    widths = {mixer.width for mixer in network.mixers() if isinstance(mixer, KimiDeltaAttention)}
    return rules.table(
        network,
        *rules.OUTER,
        *rules.PRE_NORM,
        *rules.ATTENTION,
        *(
            rule
            for width in widths
            for rule in rules.delta_attention("self_attn", width, A_log=rules.BETWEEN_ONES)
        ),
        *(
            rule
            for mixer in set(network.mixers())
            if isinstance(mixer, LatentAttention)
            for rule in rules.latent_attention("self_attn", mixer)
        ),
        *(rule for home in ("block_sparse_moe", "mlp") for rule in _feed_forward(home)),
    )


def _feed_forward(home: str) -> Iterator[TensorRule]:
    yield from layer_rules(r"ffn\.(gate|up|down)\.weight", rf"{home}.\2_proj.weight")
    yield from layer_rules(r"ffn\.router\.weight", f"{home}.gate.weight")
    yield from layer_rules(r"ffn\.router\.correction", f"{home}.gate.e_score_correction_bias")
    yield from rules.experts(home, "w1", "w3", "w2")
    yield from layer_rules(r"ffn\.shared\.(gate|up|down)\.weight", rf"{home}.shared_experts.\2_proj.weight")
