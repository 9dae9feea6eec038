"""Disk names that several families share: decoder layers, mixers, experts, the multi-token head."""

import math
from collections.abc import Iterator

from specdec.models.layouts import (
    CheckpointLayout,
    Recipe,
    TensorRule,
    copy,
    join_convs,
    join_heads,
    layer_rules,
    squeeze_conv,
    stack,
    stored_as,
)
from specdec.models.mixers import LatentAttention
from specdec.models.spec import NetworkSpec

OUTER = (
    TensorRule(r"embed\.weight", "~embed_tokens.weight"),
    TensorRule(r"norm\.weight", "~norm.weight"),
    TensorRule(r"head\.weight", "lm_head.weight"),
    TensorRule(r"head\.weight", "language_model.lm_head.weight"),
)

PRE_NORM = (
    *layer_rules(r"mixer_norm\.weight", "input_layernorm.weight"),
    *layer_rules(r"ffn_norm\.weight", "post_attention_layernorm.weight"),
)

ATTENTION = (
    *layer_rules(r"mixer2?\.([qkvo])\.(weight|bias)", r"self_attn.\2_proj.\3"),
    *layer_rules(r"mixer2?\.([qk])_norm\.weight", r"self_attn.\2_norm.weight"),
)

DENSE = tuple(layer_rules(r"ffn\.(gate|up|down)\.(weight|bias)", r"mlp.\2_proj.\3"))

DELTA_NET = (
    *layer_rules(r"mixer\.conv\.weight", "linear_attn.conv1d.weight", recipe=squeeze_conv),
    *layer_rules(r"mixer\.(A_log|dt_bias|norm\.weight)", r"linear_attn.\2"),
    *layer_rules(r"mixer\.out\.weight", "linear_attn.out_proj.weight"),
)

DELTA_NET_FLAT = tuple(layer_rules(r"mixer\.in_(qkv|z|b|a)\.weight", r"linear_attn.in_proj_\2.weight"))


def mamba(ours: str, disk: str) -> tuple[TensorRule, ...]:
    """Return the rules common to both Mamba kinds, given our name and the disk's of a mixer."""
    return (
        *layer_rules(rf"{ours}\.(in|out)\.(weight|bias)", rf"{disk}.\2_proj.\3"),
        *layer_rules(rf"{ours}\.conv\.weight", f"{disk}.conv1d.weight", recipe=squeeze_conv),
        *layer_rules(rf"{ours}\.conv\.bias", f"{disk}.conv1d.bias"),
        *layer_rules(rf"{ours}\.(A_log|D|dt_bias|norm\.weight)", rf"{disk}.\2"),
    )


MAMBA = mamba("mixer", "mamba")


def experts(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Iterator[TensorRule]:
    """Yield rules of gated experts, stored in one tensor or one by one."""
    one = f"{prefix}.experts.{{e}}"
    yield from layer_rules(r"ffn\.experts\.up", f"{prefix}.experts.gate_up_proj")
    yield from layer_rules(r"ffn\.experts\.up", f"{one}.{gate}.weight", f"{one}.{up}.weight", recipe=stack)
    yield from layer_rules(r"ffn\.experts\.down", f"{prefix}.experts.down_proj")
    yield from layer_rules(r"ffn\.experts\.down", f"{one}.{down}.weight", recipe=stack)


GATED_EXPERTS = (
    *layer_rules(r"ffn\.router\.weight", "mlp.gate.weight"),
    *experts("mlp"),
    *layer_rules(r"ffn\.shared\.(gate|up|down)\.weight", r"mlp.shared_expert.\2_proj.weight"),
    *layer_rules(r"ffn\.shared_gate\.weight", "mlp.shared_expert_gate.weight"),
)

BY_HEAD = stored_as(lambda shape: (shape[0] * shape[1], shape[2]))
FLAT = stored_as(lambda shape: (math.prod(shape),))
BETWEEN_ONES = stored_as(lambda shape: (1, 1, *shape, 1))


def delta_attention(prefix: str, width: int, *, A_log: Recipe = copy) -> Iterator[TensorRule]:
    """Yield rules of Kimi delta attention of this width; a separate module may compute the decays."""
    convs = (f"{prefix}.{name}_conv1d.weight" for name in "qkv")
    yield from layer_rules(r"mixer\.conv\.weight", *convs, recipe=join_convs(width, width, width))
    yield from layer_rules(r"mixer\.conv\.weight", f"{prefix}.conv1d.weight", recipe=squeeze_conv)
    yield from layer_rules(r"mixer\.in_([qkvb])\.weight", rf"{prefix}.\2_proj.weight")
    yield from layer_rules(r"mixer\.in_z(|_[ab])\.weight", rf"{prefix}.g\2_proj.weight")
    yield from layer_rules(r"mixer\.norm\.weight", f"{prefix}.o_norm.weight")
    yield from layer_rules(r"mixer\.out\.weight", f"{prefix}.o_proj.weight")
    for gate in (prefix, f"{prefix}.forget_gate"):
        yield from layer_rules(r"mixer\.in_a(|_[ab])\.weight", rf"{gate}.f\2_proj.weight")
        yield from layer_rules(r"mixer\.dt_bias", f"{gate}.dt_bias", recipe=FLAT)
        yield from layer_rules(r"mixer\.A_log", f"{gate}.A_log", recipe=A_log)


def latent_attention(prefix: str, mixer: LatentAttention) -> Iterator[TensorRule]:
    """Yield rules of latent attention's query, key and value projections."""
    yield from layer_rules(r"mixer\.kv_a\.weight", f"{prefix}.kv_a_proj_with_mqa.weight")
    yield from layer_rules(r"mixer\.(q_a|q_b)\.weight", rf"{prefix}.\2_proj.weight")
    yield from layer_rules(r"mixer\.kv_b\.weight", f"{prefix}.kv_b_proj.weight", recipe=BY_HEAD)
    parts = tuple(f"{prefix}.{part}_b_proj.weight" for part in "kv")  # as GGUF files store them
    recipe = join_heads(mixer.own_dim, mixer.value_dim)
    yield from layer_rules(r"mixer\.kv_b\.weight", *parts, recipe=recipe)
    yield from layer_rules(r"mixer\.(q|kv)_norm\.weight", rf"{prefix}.\2_a_layernorm.weight")


HEAD = (
    TensorRule(r"mtp\.embed_norm\.weight", "mtp.pre_fc_norm_embedding.weight"),
    TensorRule(r"mtp\.hidden_norm\.weight", "mtp.pre_fc_norm_hidden.weight"),
    TensorRule(r"mtp\.(fc|norm)\.weight", r"mtp.\1.weight"),
)

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
"""Prefixes of text checkpoints, of new and old multimodal ones, and of a bare body."""

_ROTARY = r".*\.inv_freq"
"""Rotary frequencies stored by old exporters; they follow from the config."""

_VISION = (
    r"(model\.)?(visual|vision_tower|vision_model|audio_tower|sound_encoder|sound_projection"
    r"|multi_modal_projector|merger|mlp1)\..*"
)

_OUTPUT = r"(.*\.)?lm_head\.weight"


def table(network: NetworkSpec, *rules: TensorRule, ignored: tuple[str, ...] = ()) -> CheckpointLayout:
    """Return a family's table with the prefixes and the embedding's name that most families have."""
    return CheckpointLayout(rules, PREFIXES, "embed_tokens.weight", (*always_ignored(network), *ignored))


def always_ignored(network: NetworkSpec) -> tuple[str, ...]:
    """Return expressions for tensors that a text model ignores."""
    return (_ROTARY, _VISION, _later_heads(len(network.mtp)), *((_OUTPUT,) if network.tied else ()))


def _later_heads(layers: int) -> str:
    """Return an expression for later modules of a multi-token head; the first serves every depth."""
    first = "|".join(str(i) for i in range(layers))
    return rf"mtp\.layers\.(?!({first})\.)\d+\..*"
