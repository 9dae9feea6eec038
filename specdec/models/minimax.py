"""MiniMax-Text-01 and M1: lightning attention and a few attention layers, mixtures of experts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import (
    FULL,
    LINEAR,
    MOST_LAYERS,
    assemble,
    attention,
    layer_kinds,
    refuse_unsupported,
    rope_parameters,
    rope_theta,
    top_k,
    window,
)
from specdec.models.feed_forward import MoE
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules, rows, rows_by_kind, stack
from specdec.models.mixers import Attention, Lightning
from specdec.models.norm import Norm
from specdec.models.rope import Rope

NAME = "minimax"
MODEL_TYPES: tuple[str, ...] = ("minimax", "minimax_text_01", "minimax_m1")
TITLES: Mapping[str, str] = {"minimax": "MiniMax"}

EXPERTS = "num_local_experts"
THETA = 1_000_000.0
NORM_EPS = 1e-6
"""Epsilon of the norm after lightning attention, which is not in the config."""

DERIVED = r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"
"""Stored decays, which follow from the config."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    fields.only("postnorm", True)
    fields.only("shared_intermediate_size", 0)
    norm = Norm(fields.number("rms_norm_eps", default=1e-5), wide=False)
    kinds, full, experts = _kinds(fields), _attention(fields), _experts(fields)
    frames = {FULL: _frame(fields, "full_attn", "full_attention")}
    frames[LINEAR] = _frame(fields, "linear_attn", "linear_attention")
    layers = (
        spec.LayerSpec(
            (full if kind == FULL else _lightning(full, i, len(kinds)),),
            experts,
            frame=frames[kind],
            ffn_frame=_frame(fields, "mlp", "mlp"),
        )
        for i, kind in enumerate(kinds)
    )
    return assemble(NAME, fields, tuple(layers), norm)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return each layer's mixer: `layer_types`, else the published list, else every other layer attends."""
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    if "layer_types" in fields:
        return layer_kinds(fields, supported=(FULL, LINEAR))
    if "attn_type_list" not in fields:
        return tuple(LINEAR if i % 2 else FULL for i in range(count))
    flags = fields.integers("attn_type_list")
    if len(flags) != count or not set(flags) <= {0, 1}:
        fields.refuse("attn_type_list", f"as many zeros and ones as num_hidden_layers ({count})")
    return tuple(FULL if attend else LINEAR for attend in flags)


def _frame(fields: Fields, name: str, published: str) -> spec.Frame:
    """Read the multipliers of half a layer, which is added to its normalised input."""
    alpha, beta = (
        fields.number(f"{name}_{factor}_factor", f"layernorm_{published}_{factor}", default=1.0)
        for factor in ("alpha", "beta")
    )
    return spec.Frame(outputs=(beta,), keep=alpha, keeps_normed=True)


def _attention(fields: Fields) -> Attention:
    """Read attention, which rotates the first `rotary_dim` entries of a head, or all."""
    fields.absent("attention_bias", "projections without biases (false)")
    mixer = attention(fields, rotates=False)
    sliding = window(fields) if "sliding_window" in fields else None
    return replace(mixer, rope=_rope(fields, mixer.head_dim), window=sliding)


def _rope(fields: Fields, head_dim: int) -> Rope:
    """Read rotary positions. Only `rotary_dim` decides, as in vLLM.

    Without it transformers and vLLM rotate whole heads, regardless of `partial_rotary_factor`.
    """
    if "rotary_dim" not in fields:
        for level in (rope_parameters(fields), fields):
            if level.number("partial_rotary_factor", default=1.0) != 1:
                needed = f"rotary_dim to say what is rotated ({head_dim} for what transformers computes)"
                level.refuse("partial_rotary_factor", needed)
    rotated = fields.integer("rotary_dim", default=head_dim)
    if rotated % 2 or rotated > head_dim:
        fields.refuse("rotary_dim", f"an even number of at most the width of a head ({head_dim})")
    return Rope(rotated, rope_theta(fields, default=THETA))


def _lightning(full: Attention, layer: int, layers: int) -> Lightning:
    """Build a layer's lightning attention; later layers decay more slowly."""
    scale = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return Lightning(full.heads, full.head_dim, decay_scale=scale, eps=NORM_EPS)


def _experts(fields: Fields) -> MoE:
    fields.only("hidden_act", "silu")
    return MoE(
        experts=fields.integer(EXPERTS),
        top_k=top_k(fields, EXPERTS),
        width=fields.integer("intermediate_size"),
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    return rules.table(
        network,
        *rules.OUTER,
        *rules.PRE_NORM,
        *rules.ATTENTION,
        *_lightning_rules(network),
        *layer_rules(r"ffn\.router\.weight", "block_sparse_moe.gate.weight"),
        *layer_rules(
            r"ffn\.experts\.up",
            "block_sparse_moe.experts.{e}.w1.weight",
            "block_sparse_moe.experts.{e}.w3.weight",
            recipe=stack,
        ),
        *layer_rules(r"ffn\.experts\.down", "block_sparse_moe.experts.{e}.w2.weight", recipe=stack),
        *rules.GATED_EXPERTS,
        ignored=(DERIVED,),
    )


def _lightning_rules(network: spec.NetworkSpec) -> tuple[TensorRule, ...]:
    """Yield rules that reorder per-head rows [q | k | v] to [k | q | v]."""
    lightning = next((mixer for mixer in network.mixers() if isinstance(mixer, Lightning)), None)
    if lightning is None:
        return ()
    order = partial(rows_by_kind, lightning.heads, (lightning.head_dim,) * 3, (1, 0, 2))
    recipe = rows(order, 3 * lightning.inner)
    return (
        *layer_rules(r"mixer\.in\.weight", "self_attn.qkv_proj.weight", recipe=recipe),
        *layer_rules(r"mixer\.gate\.weight", "self_attn.output_gate.weight"),
        *layer_rules(r"mixer\.norm\.weight", "self_attn.norm.weight"),
        *layer_rules(r"mixer\.out\.weight", "self_attn.out_proj.weight"),
        *layer_rules(r"mixer\.out\.weight", "self_attn.o_proj.weight"),  # as GGUF files name it
    )
