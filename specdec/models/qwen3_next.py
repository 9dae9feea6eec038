"""Qwen3-Next: gated delta nets and gated attention, mixtures of experts, a multi-token head."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import (
    FULL,
    LINEAR,
    assemble,
    attention,
    delta_net,
    head_wanted,
    is_sparse,
    layer_kinds,
    refuse_unsupported,
    softmax_moe,
    swiglu,
)
from specdec.models.feed_forward import FeedForward, MoE
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules, rows, rows_by_kind
from specdec.models.mixers import GatedDeltaNet, Mixer
from specdec.models.norm import Norm

NAME = "qwen3_next"
MODEL_TYPES: tuple[str, ...] = ("qwen3_next",)
TITLES: Mapping[str, str] = {"qwen3_next": "Qwen3-Next"}


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    norm = Norm(fields.number("rms_norm_eps"), offset=1.0)
    full = attention(fields, norm=norm, gated=True, partial=0.25, head_dim=256)
    kinds = layer_kinds(fields, supported=(FULL, LINEAR), interval=4)
    mixers: dict[str, tuple[Mixer, ...]] = {FULL: (full,)}
    if LINEAR in kinds:
        mixers[LINEAR] = (delta_net(fields, eps=norm.eps),)
    layers = tuple(spec.LayerSpec(mixers[kind], _feed_forward(fields, i)) for i, kind in enumerate(kinds))
    # Published configs do not mention the multi-token head in their checkpoints.
    head = spec.LayerSpec((full,), _experts(fields) or swiglu(fields))
    mtp = (head,) if head_wanted(fields, default=True) else ()
    return assemble(NAME, fields, layers, norm, mtp=mtp)


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    return (_experts(fields) if is_sparse(fields, layer) else None) or swiglu(fields)


def _experts(fields: Fields) -> MoE | None:
    if not fields.integer("num_experts", least=0):
        return None
    return softmax_moe(fields, renormalise=fields.flag("norm_topk_prob", default=True))


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    nets = {mixer for mixer in network.mixers() if isinstance(mixer, GatedDeltaNet)}
    return rules.table(
        network,
        *rules.OUTER,
        *rules.PRE_NORM,
        *rules.ATTENTION,
        *rules.DELTA_NET,
        *(rule for net in nets for rule in _interleaved(net)),
        *rules.DELTA_NET_FLAT,  # as GGUF files store them
        *rules.DENSE,
        *rules.GATED_EXPERTS,
        *rules.HEAD,
    )


def _interleaved(net: GatedDeltaNet) -> Iterator[TensorRule]:
    """Yield rules that split the two fused projections, whose rows are grouped by key head.

    A key head's rows are [q | k | its value heads' v | their z], and [their b | their a].
    """
    share = net.value_heads // net.key_heads
    values = share * net.value_dim
    qkvz, ba = (net.key_dim, net.key_dim, values, values), (share, share)
    for disk, widths, parts in (
        ("in_proj_qkvz", qkvz, {"qkv": (0, 1, 2), "z": (3,)}),
        ("in_proj_ba", ba, {"b": (0,), "a": (1,)}),
    ):
        for name, kinds in parts.items():
            order = partial(rows_by_kind, net.key_heads, widths, kinds)
            recipe = rows(order, net.key_heads * sum(widths))
            yield from layer_rules(rf"mixer\.in_{name}\.weight", f"linear_attn.{disk}.weight", recipe=recipe)
