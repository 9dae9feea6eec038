"""Qwen3.5, dense and mixture of experts: gated delta nets and gated attention, a multi-token head.

The text model may be a separate checkpoint or part of a multimodal one, whose other parts are ignored.
"""

from collections.abc import Mapping
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import (
    FULL,
    LINEAR,
    assemble,
    attention,
    delta_net,
    head_wanted,
    layer_kinds,
    model_type,
    refuse_unsupported,
    softmax_moe,
    swiglu,
    text_fields,
)
from specdec.models.feed_forward import FeedForward
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout
from specdec.models.mixers import Mixer
from specdec.models.norm import Norm

NAME = "qwen3_5"
MODEL_TYPES: tuple[str, ...] = (
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"),
)
TITLES: Mapping[str, str] = {"qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5 MoE"}


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    outer = Fields(config)
    text = text_fields(outer)
    for fields in (outer, text):
        refuse_unsupported(fields)
    text.only("attn_output_gate", True)
    text.only("output_gate_type", "swish", "silu")
    norm = Norm(text.number("rms_norm_eps"), offset=1.0)
    full = attention(text, norm=norm, gated=True, partial=0.25, head_dim=256)
    kinds = layer_kinds(text, supported=(FULL, LINEAR), interval=4)
    mixers: dict[str, tuple[Mixer, ...]] = {FULL: (full,)}
    if LINEAR in kinds:
        mixers[LINEAR] = (delta_net(text, eps=norm.eps),)
    ffn = _feed_forward(text, model_type(outer))
    layers = tuple(spec.LayerSpec(mixers[kind], ffn) for kind in kinds)
    mtp = (spec.LayerSpec((full,), ffn),) if head_wanted(text, default=True) else ()
    return assemble(NAME, outer, layers, norm, mtp=mtp)


def _feed_forward(text: Fields, kind: str) -> FeedForward:
    if "moe" not in kind:
        return swiglu(text)
    text.only("mlp_only_layers", [])
    return softmax_moe(text, renormalise=True)


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    return rules.table(
        network,
        *rules.OUTER,
        *rules.PRE_NORM,
        *rules.ATTENTION,
        *rules.DELTA_NET,
        *rules.DELTA_NET_FLAT,
        *rules.DENSE,
        *rules.GATED_EXPERTS,
        *rules.HEAD,
    )
