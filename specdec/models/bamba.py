"""Bamba: Mamba-2 with a few attention layers, which rotate half of each head, and dense feed-forwards."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import (
    MOST_LAYERS,
    assemble,
    attention,
    mamba2,
    refuse_unsupported,
    rope_parameters,
    rope_theta,
    rotated_width,
    swiglu,
)
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules
from specdec.models.mixers import Attention
from specdec.models.norm import Norm
from specdec.models.rope import Rope

NAME = "bamba"
MODEL_TYPES: tuple[str, ...] = ("bamba",)
TITLES: Mapping[str, str] = {"bamba": "Bamba"}

NAMES = (
    TensorRule(r"norm\.weight", "~final_layernorm.weight"),
    *layer_rules(r"ffn_norm\.weight", "pre_ff_layernorm.weight"),
    *layer_rules(r"ffn\.(gate|up|down)\.(weight|bias)", r"feed_forward.\2_proj.\3"),
)
"""Names that differ from most families."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    norm = Norm(fields.number("rms_norm_eps", default=1e-5), wide=False)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    attention_layers = fields.integers("attn_layer_indices")
    if not set(attention_layers) <= set(range(count)):
        fields.refuse("attn_layer_indices", f"numbers of layers, from 0 to {count - 1}")
    full, mamba = _attention(fields), mamba2(fields, eps=norm.eps)
    ffn = swiglu(fields, bias=fields.flag("mlp_bias", default=False))
    layers = tuple(spec.LayerSpec((full if i in attention_layers else mamba,), ffn) for i in range(count))
    return assemble(NAME, fields, layers, norm)


def _attention(fields: Fields) -> Attention:
    """Read attention, which rotates half of each head unless `rope_parameters` sets another part.

    A top-level `partial_rotary_factor` is ignored, as in transformers.
    """
    mixer = attention(fields, rotates=False)
    width = rotated_width(rope_parameters(fields), mixer.head_dim, partial=0.5)
    return replace(mixer, rope=Rope(width, rope_theta(fields, default=10_000.0)))


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    return rules.table(network, *NAMES, *rules.OUTER, *rules.PRE_NORM, *rules.ATTENTION, *rules.MAMBA)
