"""Jamba: Mamba-1 with a few attention layers without positions, dense feed-forwards and experts in turn."""

from collections.abc import Callable, Mapping
from typing import Any

from specdec.models import bamba, rules, spec
from specdec.models.blocks import (
    MOST_LAYERS,
    assemble,
    attention,
    refuse_unsupported,
    step_rank,
    swiglu,
    top_k,
)
from specdec.models.feed_forward import MoE
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, layer_rules
from specdec.models.mixers import Mamba1
from specdec.models.norm import Norm

NAME = "jamba"
MODEL_TYPES: tuple[str, ...] = ("jamba",)
TITLES: Mapping[str, str] = {"jamba": "Jamba"}


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    norm = Norm(fields.number("rms_norm_eps", default=1e-6), wide=False)
    is_attention, expert = _every(fields, "attn", 8, 4), _every(fields, "expert", 2, 1)
    full, mamba, dense = attention(fields, rotates=False), _mamba(fields, norm.eps), swiglu(fields)
    experts = _experts(fields) or dense
    layers = (
        spec.LayerSpec((full if is_attention(i) else mamba,), experts if expert(i) else dense)
        for i in range(fields.integer("num_hidden_layers", most=MOST_LAYERS))
    )
    return assemble(NAME, fields, tuple(layers), norm)


def _every(fields: Fields, kind: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return a predicate for the layers of a kind: one of each period."""
    period = fields.integer(f"{kind}_layer_period", default=period)
    offset = fields.integer(f"{kind}_layer_offset", default=offset, least=0)
    if offset >= period:
        fields.refuse(f"{kind}_layer_offset", f"a number below {kind}_layer_period ({period})")
    return lambda layer: layer % period == offset


def _mamba(fields: Fields, eps: float) -> Mamba1:
    return Mamba1(
        inner=fields.integer("mamba_expand", default=2) * fields.integer("hidden_size"),
        state_dim=fields.integer("mamba_d_state", default=16, least=2),
        rank=step_rank(fields, "mamba_dt_rank"),
        conv=fields.integer("mamba_d_conv", default=4),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias", default=False),
        norms="weighted",
        eps=eps,
    )


def _experts(fields: Fields) -> MoE | None:
    """Read experts without renormalised weights; a single expert is a dense feed-forward."""
    names = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    if fields.integer(names, default=16) == 1:
        return None
    return MoE(
        experts=fields.integer(names, default=16),
        top_k=top_k(fields, names),
        width=fields.integer("intermediate_size"),
        renormalise=False,
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    own = (
        *layer_rules(r"mixer\.(x|dt)\.weight", r"mamba.\2_proj.weight"),
        *layer_rules(r"mixer\.dt_bias", "mamba.dt_proj.bias"),
        *layer_rules(r"mixer\.(dt|b|c)_norm\.weight", r"mamba.\2_layernorm.weight"),
        *layer_rules(r"ffn\.router\.weight", "feed_forward.router.weight"),
        *rules.experts("feed_forward"),
    )
    return rules.table(
        network, *own, *bamba.NAMES, *rules.OUTER, *rules.PRE_NORM, *rules.ATTENTION, *rules.MAMBA
    )
