"""LFM3: gated short convolutions, sliding and full attention with a gate per head.

For LFM3-VL only the text model is loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.models import lfm2, rules, spec
from specdec.models.blocks import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    assemble,
    attention,
    layer_kinds,
    refuse_unsupported,
    text_fields,
    window,
)
from specdec.models.feed_forward import MLP
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, layer_rules
from specdec.models.mixers import Attention, Mixer
from specdec.models.norm import Norm
from specdec.models.rope import Rope

NAME = "lfm3"
MODEL_TYPES: tuple[str, ...] = ("lfm3", "lfm3_vl")
TITLES: Mapping[str, str] = {"lfm3": "LFM3"}

CONV = lfm2.CONV
WINDOW, HEAD_DIM, TAPS = 256, 128, 7
THETA: Mapping[str, float] = {SLIDING: 10_000.0, FULL: 1_000_000.0}
TURNED: Mapping[str, float] = {SLIDING: 1.0, FULL: 0.5}
"""Default fraction of a head's pairs that are rotated."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    outer = Fields(config)
    fields = text_fields(outer)
    for level in (outer, fields):
        refuse_unsupported(level)
    norm = Norm(fields.number("norm_eps", "rms_norm_eps", default=1e-5), wide=False)
    kinds = _kinds(fields)
    mixers: dict[str, Mixer] = {CONV: lfm2.short_conv(fields, taps=TAPS)}
    mixers |= {kind: _attention(fields, kind, norm) for kind in (FULL, SLIDING) if kind in kinds}
    frame = spec.SANDWICH if fields.flag("use_sandwich_norm", default=True) else spec.PRE_NORM
    ffn = MLP(fields.integer("intermediate_size"), "swiglu")
    layers = (spec.LayerSpec((mixers[kind],), ffn, frame=frame, ffn_frame=frame) for kind in kinds)
    return assemble(NAME, outer, tuple(layers), norm, tied=True, max_length=128_000)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return each layer's mixer: `layer_types`, else one full and one sliding attention of every four."""
    if "layer_types" in fields:
        return layer_kinds(fields, supported=(FULL, SLIDING, CONV))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return tuple(FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(count))


def _attention(fields: Fields, kind: str, norm: Norm) -> Attention:
    fields.integer("num_key_value_heads")  # here null does not default to the number of heads
    head_dim = fields.integer("head_dim", default=HEAD_DIM)
    return replace(
        attention(fields, norm=norm, rotates=False, scale=head_dim**-0.5),
        head_dim=head_dim,
        rope=_rope(fields, kind, head_dim),
        window=window(fields, default=WINDOW) if kind == SLIDING else None,
        head_gate=fields.flag("use_attention_gate", default=True),
    )


def _rope(fields: Fields, kind: str, head_dim: int) -> Rope:
    """Read a layer kind's rotary positions: all pairs of a head are rotated, or the first part of them."""
    if head_dim % 2:
        fields.refuse("head_dim", "an even number")
    pairs = head_dim // 2
    fields.only("partial_rotary_factor", 1, 1.0)
    if "rope_parameters" not in fields:
        return Rope(head_dim, THETA[kind], turned=int(TURNED[kind] * pairs), wide=True)
    fields.absent("rope_scaling", "rope_parameters in its place, with an object for each kind of layer")
    kinds = fields.within("rope_parameters")
    parameters = kinds.within(kind)
    if kind not in kinds:
        kinds.refuse(kind, "an object with the rotary parameters of these layers")
    for name in ("rope_type", "type"):
        parameters.only(name, "default", "proportional")
    parameters.only("factor", 1, 1.0)
    part = parameters.number("partial_rotary_factor", default=1.0)
    if parameters.get("rope_type", "type") != "proportional":
        parameters.only("partial_rotary_factor", 1, 1.0)
    if not 0 <= part <= 1:
        parameters.refuse("partial_rotary_factor", "a number from 0 to 1")
    theta = parameters.number("rope_theta")
    if theta <= 0:
        parameters.refuse("rope_theta", "a number above 0")
    return Rope(head_dim, theta, turned=int(part * head_dim // 2), wide=True)


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout; the gate is named differently as published and in transformers."""
    return rules.table(
        network,
        *lfm2.NAMES,
        *rules.OUTER,
        *layer_rules(r"mixer_post_norm\.weight", "post_operator_norm.weight"),
        *layer_rules(r"ffn_post_norm\.weight", "post_ffn_norm.weight"),
        *layer_rules(r"mixer\.gate\.weight", "self_attn.gate_proj.weight"),
        *layer_rules(r"mixer\.gate\.weight", "self_attn.g_proj.weight"),
        *rules.ATTENTION,
    )
