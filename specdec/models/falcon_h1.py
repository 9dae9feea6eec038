"""Falcon-H1: Mamba-2 and attention in parallel in every layer, with µP multipliers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.models import rules, spec
from specdec.models.bamba import NAMES
from specdec.models.blocks import MOST_LAYERS, assemble, attention, mamba2, refuse_unsupported, swiglu
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout
from specdec.models.mixers import Attention, Mamba2
from specdec.models.mixers.mamba2 import Normed
from specdec.models.norm import Norm

NAME = "falcon_h1"
MODEL_TYPES: tuple[str, ...] = ("falcon_h1",)
TITLES: Mapping[str, str] = {"falcon_h1": "Falcon-H1"}


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    norm = Norm(fields.number("rms_norm_eps", default=1e-5), wide=False)
    gate, down = fields.numbers("mlp_multipliers", 2)
    ffn = swiglu(fields, bias=fields.flag("mlp_bias", default=False))
    layer = spec.LayerSpec(
        (_mamba(fields, norm.eps), _attention(fields)),
        replace(ffn, gate_scale=gate),
        frame=spec.Frame(
            inputs=(_multiplier(fields, "ssm_in"), _multiplier(fields, "attention_in")),
            outputs=(_multiplier(fields, "ssm_out"), _multiplier(fields, "attention_out")),
        ),
        ffn_frame=spec.Frame(outputs=(down,)),
    )
    return assemble(
        *(NAME, fields, (layer,) * fields.integer("num_hidden_layers", most=MOST_LAYERS), norm),
        embed_scale=_multiplier(fields, "embedding"),
        logit_scale=_multiplier(fields, "lm_head"),
    )


def _multiplier(fields: Fields, of: str) -> float:
    return fields.number(f"{of}_multiplier", default=1.0)


def _attention(fields: Fields) -> Attention:
    """Read attention; the key multiplier is applied to the score scale."""
    mixer = attention(fields)
    return replace(mixer, scale=mixer.scale * _multiplier(fields, "key"))


def _mamba(fields: Fields, eps: float) -> Mamba2:
    inner = fields.integer("mamba_d_ssm") if "mamba_d_ssm" in fields else None
    gate, x, b, c, dt = fields.numbers("ssm_multipliers", 5)
    mixer = mamba2(fields, eps=eps, inner=inner)
    normed: Normed = "before gate" if fields.flag("mamba_norm_before_gate", default=True) else "of gated"
    return replace(
        mixer,
        out_bias=fields.flag("projectors_bias", default=False),
        norm=normed if fields.flag("mamba_rms_norm", default=False) else "none",
        wide_norm=True,
        scales=(gate, x, b, c, dt),
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    return rules.table(network, *NAMES, *rules.OUTER, *rules.PRE_NORM, *rules.ATTENTION, *rules.MAMBA)
