"""Zamba2: Mamba-2; some layers first run a shared attention block on the stream and the embeddings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specdec.models import rules, spec
from specdec.models.blocks import (
    LINEAR,
    MOST_LAYERS,
    assemble,
    kv_heads,
    layer_kinds,
    refuse_unsupported,
    rope,
)
from specdec.models.feed_forward import MLP
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules, rows
from specdec.models.mixers import Attention, Mamba2, Mixer, SharedBlock
from specdec.models.norm import Norm

NAME = "zamba2"
MODEL_TYPES: tuple[str, ...] = ("zamba2",)
TITLES: Mapping[str, str] = {"zamba2": "Zamba2"}

HYBRID = "hybrid"
MAX_LENGTH = 4096
_PUBLISHED = 6, 12, 18, 24, 30, 36, 42, 47, 51
"""Default hybrid layers."""
_MAMBA_EPS = 1e-5
"""Not in the config."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    fields.absent(
        "use_long_context", "positions that are not rescaled: leave it out for the first 4096 tokens"
    )
    norm = Norm(fields.number("rms_norm_eps", default=1e-5), wide=False)
    blocks = fields.integer("num_mem_blocks", default=1)
    layers = hybrid_layers(
        read_kinds(fields, _PUBLISHED), _block(fields, norm), _mamba(fields), blocks=blocks
    )
    return assemble(NAME, fields, tuple(layers), norm, tied=True, max_length=MAX_LENGTH)


def read_kinds(fields: Fields, hybrid: Sequence[int]) -> tuple[str, ...]:
    """Return each layer's kind; `hybrid` is the default."""
    if fields.strings("layer_types", "layers_block_type") is not None:
        return layer_kinds(fields, supported=(LINEAR, HYBRID))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    if hybrid and hybrid[-1] >= count:
        fields.refuse("layers_block_type", f"{LINEAR!r} or {HYBRID!r} for each of the {count} layers")
    return tuple(HYBRID if i in hybrid else LINEAR for i in range(count))


def hybrid_layers(
    kinds: Sequence[str], block: SharedBlock, mamba: Mixer, *, blocks: int
) -> Iterator[spec.LayerSpec]:
    """Yield the layers; hybrid ones use the shared blocks in turn."""
    hybrid = [i for i, kind in enumerate(kinds) if kind == HYBRID]
    for i, kind in enumerate(kinds):
        if kind == LINEAR:
            yield spec.LayerSpec((mamba,), None)
            continue
        n = hybrid.index(i)
        shares = hybrid[n % blocks] if n >= blocks else None
        yield spec.LayerSpec((block, mamba), None, frame=spec.Frame(side=True), shares=shares)


def shared_attention(fields: Fields, *, kv_heads_required: bool = False) -> Attention:
    """Read attention over the concatenated stream and embeddings, without positions."""
    width = 2 * fields.integer("hidden_size")
    fields.only("attention_hidden_size", width)
    fields.divides("num_key_value_heads", "num_attention_heads")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", "attention_head_dim", default=width // heads)
    return Attention(
        heads=heads,
        kv_heads=kv_heads(fields, heads, required=kv_heads_required),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=None,
        qk_norm=None,
        gated=False,
    )


def _block(fields: Fields, norm: Norm) -> SharedBlock:
    fields.only("hidden_act", "gelu")
    hidden, shared = fields.integer("hidden_size"), shared_attention(fields)
    if fields.flag("use_mem_rope", default=False):
        shared = replace(shared, rope=rope(fields, shared.head_dim))
    adapts = fields.flag("use_shared_attention_adapter", default=False)
    if adapts and {shared.heads * shared.head_dim, shared.kv_heads * shared.head_dim} != {2 * hidden}:
        fields.refuse("num_key_value_heads", f"heads that make up twice hidden_size ({2 * hidden})")
    width = fields.integer("intermediate_size", default=4 * hidden)
    ffn = MLP(width, "geglu", bias=fields.flag("add_bias_linear", default=False))
    rank = fields.integer("adapter_rank", default=128)
    return SharedBlock(shared, ffn, norm, rank, adapts_attention=adapts)


def _mamba(fields: Fields) -> Mamba2:
    inner = fields.integer("mamba_expand", default=2) * fields.integer("hidden_size")
    heads, groups = fields.integer("n_mamba_heads", default=8), fields.integer("mamba_ngroups", default=1)
    if heads % groups:
        fields.refuse("n_mamba_heads", f"a multiple of mamba_ngroups ({groups})")
    if heads * fields.integer("mamba_headdim", default=inner // heads) != inner:
        fields.refuse("n_mamba_heads", f"heads (of mamba_headdim) that make up the width of x ({inner})")
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=fields.integer("mamba_d_state", default=64),
        conv=fields.integer("mamba_d_conv", default=4),
        conv_bias=True,
        bias=fields.flag("add_bias_linear", default=False),
        eps=_MAMBA_EPS,
        step_limit=(fields.number("time_step_min", default=0.001), math.inf),
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout; adapters are named after their block and the number of its use."""
    shared = (*_feed_forward(network), *_adapters(network))
    return rules.table(network, *shared, *outer_rules(network, "shared_transformer"), *rules.MAMBA)


def outer_rules(network: spec.NetworkSpec, block: str) -> Iterator[TensorRule]:
    """Yield the rules common to both generations; `block` is a shared block's disk name."""
    shared = r"mixer\.shared\."
    yield TensorRule(r"norm\.weight", "~final_layernorm.weight")
    if hybrid := "|".join(str(i) for i in uses(network)):
        disk = r"~layers.\1.mamba_decoder.input_layernorm.weight"
        yield TensorRule(rf"layers\.({hybrid})\.mixer_norm\.weight", disk)
    yield from rules.OUTER
    yield from rules.PRE_NORM
    yield from rules.mamba("mixer2", "mamba_decoder.mamba")
    yield from layer_rules(r"mixer\.linear\.weight", "linear.weight")
    yield from layer_rules(rf"{shared}norm\.weight", f"{block}.input_layernorm.weight")
    yield from layer_rules(rf"{shared}ffn_norm\.weight", f"{block}.pre_ff_layernorm.weight")
    yield from layer_rules(rf"{shared}attention\.([qkvo])\.weight", rf"{block}.self_attn.\2_proj.weight")
    names = rf"{block}.feed_forward.\2_proj.\3"
    yield from layer_rules(rf"{shared}ffn\.(gate|up|down)\.(weight|bias)", names)


def uses(network: spec.NetworkSpec) -> Mapping[int, int]:
    """Return the hybrid layers, in order, with the layers that own their blocks."""
    return {
        i: i if layer.shares is None else layer.shares
        for i, layer in enumerate(network.layers)
        if layer.frame.side
    }


def _feed_forward(network: spec.NetworkSpec) -> Iterator[TensorRule]:
    """Yield rules that split the projection with rows [gate | up]."""
    blocks = {mixer for mixer in network.mixers() if isinstance(mixer, SharedBlock)}
    for block in blocks:
        width = block.ffn.width
        for i, name in enumerate(("gate", "up")):
            yield from layer_rules(
                rf"mixer\.shared\.ffn\.{name}\.(weight|bias)",
                r"shared_transformer.feed_forward.gate_up_proj.\2",
                recipe=rows(partial(torch.arange, i * width, (i + 1) * width), 2 * width),
            )


def _adapters(network: spec.NetworkSpec) -> Iterator[TensorRule]:
    for n, (layer, holder) in enumerate(uses(network).items()):
        for i, half in enumerate(("in", "out")):
            ours, disk = rf"layers\.{layer}\.mixer\.", f"~layers.{holder}.shared_transformer."
            up = f"feed_forward.gate_up_proj_adapter_list.{n}.{i}.weight"
            yield TensorRule(rf"{ours}up_adapter\.{half}\.weight", f"{disk}{up}")
            attention = rf"self_attn.linear_\1_adapter_list.{n}.{i}.weight"
            yield TensorRule(rf"{ours}([qkv])_adapter\.{half}\.weight", f"{disk}{attention}")
