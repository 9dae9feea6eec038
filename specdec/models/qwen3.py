"""Qwen3, dense and with experts: attention in every layer, possibly sliding in some."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import (
    FULL,
    SLIDING,
    assemble,
    attention,
    behind_full_layers,
    has_window,
    is_sparse,
    layer_kinds,
    refuse_unsupported,
    softmax_moe,
    swiglu,
    window,
)
from specdec.models.feed_forward import FeedForward
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout
from specdec.models.norm import Norm

NAME = "qwen3"
MODEL_TYPES: tuple[str, ...] = ("qwen3", "qwen3_moe")
TITLES: Mapping[str, str] = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3 MoE"}


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields, slides=True)
    moe = fields.get("model_type") == "qwen3_moe"
    norm = Norm(fields.number("rms_norm_eps"), wide=False)
    kinds = _kinds(fields) if moe else behind_full_layers(fields)
    full = attention(fields, norm=norm, head_dim=None if moe else 128)
    mixers = {FULL: full}
    if SLIDING in kinds:
        mixers[SLIDING] = replace(full, window=window(fields, default=4096))
    layers = (
        spec.LayerSpec((mixers[kind],), _feed_forward(fields, i) if moe else swiglu(fields))
        for i, kind in enumerate(kinds)
    )
    return assemble(NAME, fields, tuple(layers), norm)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return each layer's kind with experts: all slide with `use_sliding_window`, else none."""
    kind = SLIDING if has_window(fields) else FULL
    return layer_kinds(fields, supported=(kind,), default=kind)


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    """Read a layer's experts, or its dense feed-forward."""
    # Published configs use one name, transformers writes the other.
    experts = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    if not is_sparse(fields, layer) or not fields.integer(experts, least=0):
        return swiglu(fields)
    renormalise = fields.flag("norm_topk_prob", default=False)
    return softmax_moe(fields, renormalise=renormalise, experts=experts, shared=False)


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    return rules.table(
        network, *rules.OUTER, *rules.PRE_NORM, *rules.ATTENTION, *rules.DENSE, *rules.GATED_EXPERTS
    )
