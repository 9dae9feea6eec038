"""Qwen3: attention in every layer, no recurrent one."""

from collections.abc import Mapping
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import FULL, assemble, attention, layer_kinds, refuse_unsupported, swiglu
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
    refuse_unsupported(fields)
    norm = Norm(fields.number("rms_norm_eps"), wide=False)
    layer = spec.Layer((attention(fields, norm=norm, gated=False, partial=1.0),), swiglu(fields))
    kinds = layer_kinds(fields, supported=(FULL,))
    return assemble(NAME, fields, (layer,) * len(kinds), norm)


def layout(network: spec.Network) -> Layout:
    """Say where the tensors lie."""
    return Layout(
        rules=(*rules.OUTER, *rules.PRE_NORM, *rules.ATTENTION, *rules.DENSE),
        prefixes=rules.PREFIXES,
        embedding="embed_tokens.weight",
        ignored=rules.ignored(network),
    )
