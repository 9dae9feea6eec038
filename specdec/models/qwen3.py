"""Qwen3: attention in every layer, no recurrent one; some layers may slide."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    assemble,
    attention,
    layer_kinds,
    refuse_unsupported,
    swiglu,
    window,
)
from specdec.models.fields import Fields
from specdec.models.layouts import Layout
from specdec.models.norm import Norm

NAME = "qwen3"
MODEL_TYPES: tuple[str, ...] = ("qwen3",)
TITLES: Mapping[str, str] = {"qwen3": "Qwen3"}
HAS_MTP = False


def network(config: Mapping[str, Any]) -> spec.Network:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields, slides=True)
    norm = Norm(fields.number("rms_norm_eps"), wide=False)
    kinds, ffn = _kinds(fields), swiglu(fields)
    full = attention(fields, norm=norm, head_dim=128)
    mixers = {FULL: full}
    if SLIDING in kinds:
        mixers[SLIDING] = replace(full, window=window(fields, default=4096))
    layers = (spec.Layer((mixers[kind],), ffn) for kind in kinds)
    return assemble(NAME, fields, tuple(layers), norm)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Name the layers that slide: with `use_sliding_window` those of `layer_types`, or from a number on."""
    slides = fields.flag("use_sliding_window", default=False)
    if "layer_types" in fields:
        return layer_kinds(fields, supported=(FULL, SLIDING) if slides else (FULL,))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    first = fields.integer("max_window_layers", default=28, least=0)
    return tuple(SLIDING if slides and i >= first else FULL for i in range(count))


def layout(network: spec.Network) -> Layout:
    """Say where the tensors lie."""
    return Layout(
        rules=(*rules.OUTER, *rules.PRE_NORM, *rules.ATTENTION, *rules.DENSE),
        prefixes=rules.PREFIXES,
        embedding="embed_tokens.weight",
        ignored=rules.ignored(network),
    )
