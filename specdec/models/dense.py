"""Llama, Qwen2, Mistral and SmolLM3: attention and a dense feed-forward in every layer.

They differ in biases, sliding layers, and layers without rotary positions.
"""

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
    behind_full_layers,
    layer_kinds,
    refuse_unsupported,
    sliding_kinds,
    swiglu,
    window,
)
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout
from specdec.models.mixers import Attention
from specdec.models.norm import Norm

NAME = "llama"
MODEL_TYPES: tuple[str, ...] = ("llama", "qwen2", "mistral", "ministral", "smollm3")
TITLES: Mapping[str, str] = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "smollm3": "SmolLM3"}

WINDOW: Mapping[str, int] = {"qwen2": 4096, "mistral": 4096, "ministral": 4096}
"""Default window if a config lacks the field; null means none."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    kind = fields.get("model_type")
    refuse_unsupported(fields, slides=kind != "llama")
    biases = kind in ("llama", "smollm3")
    if not biases:
        fields.absent("mlp_bias", "feed-forwards without biases (false)")
    full = _attention(fields, kind)
    ffn = swiglu(fields, bias=biases and fields.flag("mlp_bias", default=False))
    rotates = _rotates(fields, kind)
    kinds = _kinds(fields, kind, rotates)
    width = window(fields, default=WINDOW.get(kind)) if SLIDING in kinds else None
    layers = (
        spec.LayerSpec(
            (replace(full, window=width if k == SLIDING else None, rope=full.rope if rotate else None),), ffn
        )
        for k, rotate in zip(kinds, rotates, strict=True)
    )
    norm = Norm(fields.number("rms_norm_eps"), wide=False)
    return assemble(NAME, fields, tuple(layers), norm, tied=kind == "smollm3")


def _attention(fields: Fields, kind: str) -> Attention:
    """Read attention; biases depend on the family: a field, none, or all projections except the last."""
    if kind == "qwen2":
        fields.only("attention_bias", True)
        return replace(attention(fields), bias=True, out_bias=False)
    if kind == "llama":
        return attention(fields, kv_heads_required=False)
    if kind == "smollm3":
        return attention(fields, theta=2_000_000.0)
    fields.absent("attention_bias", "attention without biases (false)")
    return attention(fields)


def _rotates(fields: Fields, kind: str) -> tuple[bool, ...]:
    """Return which layers have rotary positions: by `no_rope_layers`, else all but every n-th."""
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    if kind != "smollm3":
        return (True,) * count
    interval = fields.integer("no_rope_layer_interval", default=4)
    if "no_rope_layers" not in fields:
        return tuple((i + 1) % interval != 0 for i in range(count))
    flags = fields.integers("no_rope_layers")
    if len(flags) < count or not set(flags) <= {0, 1}:
        fields.refuse("no_rope_layers", f"1 (with positions) or 0 for each of {count} layers")
    return tuple(flag == 1 for flag in flags[:count])


def _kinds(fields: Fields, kind: str, rotates: tuple[bool, ...]) -> tuple[str, ...]:
    """Return each layer's kind: which layers slide depends on the family."""
    if kind == "llama":
        fields.absent("sliding_window", "full attention (null)")
        return layer_kinds(fields, supported=(FULL,))
    if kind == "qwen2":
        return behind_full_layers(fields)
    if kind == "smollm3":
        return sliding_kinds(fields, [not turns and "sliding_window" in fields for turns in rotates])
    slides = not fields.null("sliding_window")
    fields.only("use_sliding_window", slides)
    return layer_kinds(fields, supported=(FULL, SLIDING), default=SLIDING if slides else FULL)


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    return rules.table(network, *rules.OUTER, *rules.PRE_NORM, *rules.ATTENTION, *rules.DENSE)
