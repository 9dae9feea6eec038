"""Granite 4: Mamba-2 and attention with multipliers, dense or with experts beside a shared one."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from specdec.models import rules, spec
from specdec.models.blocks import (
    FULL,
    LINEAR,
    MOST_LAYERS,
    assemble,
    attention,
    layer_kinds,
    mamba2,
    refuse_unsupported,
    swiglu,
    top_k,
)
from specdec.models.feed_forward import MLP, FeedForward, MoE
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules, rows
from specdec.models.mixers import Mixer
from specdec.models.norm import Norm

NAME = "granitemoehybrid"
MODEL_TYPES: tuple[str, ...] = ("granitemoehybrid",)
TITLES: Mapping[str, str] = {"granitemoehybrid": "Granite 4"}
EXPERTS = "num_local_experts"


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    fields.absent("mlp_bias", "feed-forwards without biases (false)")
    fields.only("position_embedding_type", "rope", "nope")
    norm = Norm(fields.number("rms_norm_eps"), wide=False)
    kinds = layer_kinds(fields, supported=(FULL, LINEAR), interval=MOST_LAYERS + 1)
    frame = spec.Frame(outputs=(fields.number("residual_multiplier", default=1.0),))
    logits = fields.number("logits_scaling", default=1.0)
    if logits == 0:
        fields.refuse("logits_scaling", "a number other than 0")
    ffn = _feed_forward(fields)
    mixers: dict[str, Mixer] = {
        FULL: attention(
            fields,
            rotates=fields.get("position_embedding_type") == "rope",
            kv_heads_required=False,
            scale=fields.number("attention_multiplier", default=1.0),
        )
    }
    if LINEAR in kinds:
        mixers[LINEAR] = mamba2(fields, eps=norm.eps)
    layers = {kind: spec.LayerSpec((m,), ffn, frame=frame, ffn_frame=frame) for kind, m in mixers.items()}
    return assemble(
        *(NAME, fields, tuple(layers[kind] for kind in kinds), norm),
        embed_scale=fields.number("embedding_multiplier", default=1.0),
        logit_scale=1 / logits,
    )


def _feed_forward(fields: Fields) -> FeedForward:
    """Read the feed-forward: experts with a shared one, or dense if there are no experts."""
    if not fields.integer(EXPERTS, default=8, least=0):
        return swiglu(fields, "shared_intermediate_size")
    fields.only("hidden_act", "silu")
    return MoE(
        experts=fields.integer(EXPERTS, default=8),
        top_k=top_k(fields, EXPERTS),
        width=fields.integer("intermediate_size"),
        shared_width=fields.integer("shared_intermediate_size", least=0),
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    return rules.table(
        network,
        *rules.OUTER,
        *rules.PRE_NORM,
        *rules.ATTENTION,
        *rules.MAMBA,
        *_shared(network),
        *layer_rules(r"ffn\.(?:shared\.)?down\.weight", "shared_mlp.output_linear.weight"),
        *layer_rules(r"ffn\.router\.weight", "block_sparse_moe.router.layer.weight"),
        *layer_rules(r"ffn\.router\.weight", "block_sparse_moe.router.weight"),
        *layer_rules(r"ffn\.experts\.up", "block_sparse_moe.input_linear.weight"),
        *layer_rules(r"ffn\.experts\.down", "block_sparse_moe.output_linear.weight"),
        *rules.experts("block_sparse_moe"),
        *layer_rules(
            r"ffn\.(?:shared\.)?(gate|up)\.weight", r"shared_mlp.\2_proj.weight"
        ),  # as in GGUF files
    )


def _shared(network: spec.NetworkSpec) -> Iterator[TensorRule]:
    """Yield rules that split the projection with rows [gate | up]."""
    ffn = network.layers[0].ffn
    shared = ffn.shared if isinstance(ffn, MoE) else ffn
    if not isinstance(shared, MLP):
        return
    for i, name in enumerate(("gate", "up")):
        order = partial(torch.arange, i * shared.width, (i + 1) * shared.width)
        yield from layer_rules(
            rf"ffn\.(?:shared\.)?{name}\.weight",
            "shared_mlp.input_linear.weight",
            recipe=rows(order, 2 * shared.width),
        )
