"""Network parts from config fields that several families share."""

import math
from collections.abc import Mapping, Sequence

from specdec.errors import CheckpointError
from specdec.models.feed_forward import MLP, MoE
from specdec.models.fields import LARGEST, TEXT, Fields
from specdec.models.formats import announced
from specdec.models.mixers import Attention, GatedDeltaNet, Mamba2
from specdec.models.norm import Norm
from specdec.models.rope import LinearScaling, Llama3Scaling, Rope, Scaling, YarnScaling, yarn_attention
from specdec.models.spec import LayerSpec, NetworkSpec

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
DENSE, SPARSE = "dense", "sparse"

MOST_LAYERS = 1024
"""Each layer takes memory before the first tensor is looked up; published models have a tenth of this."""

MOST_SCALED = 1e9
"""Position scaling parameters lie between this and its inverse; others have no useful logarithm."""

TIED = "tie_embedding", "tie_word_embeddings"
"""Spellings of one field; LFM2's own takes precedence over the one that savers write."""

# Legacy names of the layer kinds.
_LEGACY_KINDS = {"attention": FULL, "mamba": LINEAR}


def refuse_unsupported(fields: Fields, *, slides: bool = False) -> None:
    """Refuse options that no family implements, and sliding windows unless `slides`."""
    announced(fields)
    fields.absent("compression_config", "weights that are not compressed: use the original checkpoint")
    if not slides:
        fields.absent("use_sliding_window", "full attention (false)")


def layer_kinds(
    fields: Fields, *, supported: tuple[str, ...], interval: int | None = None, default: str | None = None
) -> tuple[str, ...]:
    """Return each layer's mixer: `layer_types`, else `default`, else full attention every `interval`."""
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = fields.strings("layer_types", "layers_block_type")
    if kinds is None and default:
        return (default,) * count
    if kinds is None:
        full_interval = fields.integer("full_attention_interval", default=interval or 1)
        return tuple(FULL if (i + 1) % full_interval == 0 else LINEAR for i in range(count))
    kinds = modern_kinds(kinds)
    if unknown := set(kinds) - set(supported):
        fields.refuse("layer_types", f"only {' and '.join(supported)}, not {', '.join(sorted(unknown))}")
    if len(kinds) != count:
        fields.refuse("layer_types", f"as many entries as num_hidden_layers ({count}), not {len(kinds)}")
    return kinds


def has_window(fields: Fields) -> bool:
    """Return whether layers can slide: `use_sliding_window` is set and the window is not null."""
    return not fields.null("sliding_window") and fields.flag("use_sliding_window", default=False)


def sliding_kinds(fields: Fields, slides: Sequence[bool]) -> tuple[str, ...]:
    """Return each layer's kind under `use_sliding_window`: from `layer_types`, else from `slides`."""
    on = has_window(fields)
    if "layer_types" in fields:
        return layer_kinds(fields, supported=(FULL, SLIDING) if on else (FULL,))
    return tuple(SLIDING if on and is_sliding else FULL for is_sliding in slides)


def behind_full_layers(fields: Fields) -> tuple[str, ...]:
    """Return each layer's kind if all but the first `max_window_layers` slide, as in Qwen."""
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    first = fields.integer("max_window_layers", default=28, least=0)
    return sliding_kinds(fields, [i >= first for i in range(count)])


def modern_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Translate older names of layer kinds."""
    return tuple(_LEGACY_KINDS.get(kind, kind) for kind in kinds)


def rope_parameters(fields: Fields) -> Fields:
    """Return the nested rotary parameters: `rope_scaling` replaces `rope_parameters`, as in transformers."""
    return fields.within("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")


def rope_theta(fields: Fields, *, default: float, types: tuple[str, ...] = ("default", "mrope")) -> float:
    """Read the rotary base, nested or at the top level; refuse any type not in `types`.

    Text positions have equal multimodal sections, so "mrope" is plain here.
    """
    nested = rope_parameters(fields)
    for kind in ("rope_type", "type"):
        nested.only(kind, *types)
    if nested.null("rope_theta"):
        nested.refuse("rope_theta", "a number above 0")
    for name in nested.names():
        if isinstance(nested.get(name), Mapping):
            nested.refuse(name, "the same rotary parameters in all layers, without a level for each kind")
    theta = nested.number("rope_theta", default=fields.number("rope_theta", default=default))
    if theta <= 0:
        (nested if "rope_theta" in nested else fields).refuse("rope_theta", "a number above 0")
    return theta


def rope(fields: Fields, head_dim: int, *, partial: float | None = None, theta: float = 10_000.0) -> Rope:
    """Read rotary parameters.

    `partial` is the default of `partial_rotary_factor`, the rotated part of a head. None: the family's
    reference rotates whole heads and ignores the field, so any other part is refused.
    """
    theta = rope_theta(fields, default=theta, types=("default", "mrope", "llama3", "linear", "yarn"))
    nested = rope_parameters(fields)
    if partial is None:
        for level in (nested, fields):
            if level.number("partial_rotary_factor", default=1.0) != 1:
                level.refuse("partial_rotary_factor", "1: transformers ignores it and rotates whole heads")
    outer = fields if "partial_rotary_factor" in fields else nested
    where = nested if "partial_rotary_factor" in nested else outer
    return Rope(
        rotated_width(where, head_dim, partial=partial or 1.0), theta, scaling=_scaling(fields, theta)
    )


def _scaling(fields: Fields, theta: float) -> Scaling | None:
    nested = rope_parameters(fields)
    kind = nested.get("rope_type", "type")
    if kind == "linear":
        return LinearScaling(_positive(nested, "factor"))
    if kind == "yarn":
        return _yarn(fields, nested, theta)
    if kind != "llama3":
        return None
    factor = _positive(nested, "factor")
    low, high = _positive(nested, "low_freq_factor"), _positive(nested, "high_freq_factor")
    if high <= low:
        nested.refuse("high_freq_factor", f"a number above low_freq_factor ({low:g})")
    return Llama3Scaling(factor, low, high, _original_context(fields, nested))


def _yarn(fields: Fields, nested: Fields, theta: float) -> YarnScaling:
    """Read YaRN's parameters; a missing attention_factor follows from the others."""
    context = _original_context(fields, nested)
    default_factor = fields.integer("max_position_embeddings") / context if nested.null("factor") else None
    factor = _positive(nested, "factor", default_factor)
    fast, slow = _positive(nested, "beta_fast", 32.0), _positive(nested, "beta_slow", 1.0)
    if fast < slow:
        nested.refuse("beta_fast", f"a number of at least beta_slow ({slow:g})")
    if theta <= 1:
        nested.refuse("rope_theta", "a number above 1, with rope_type yarn")
    m, m_all = (nested.number(name, default=0.0) for name in ("mscale", "mscale_all_dim"))
    if min(m, m_all) < 0:
        nested.refuse("mscale" if m < 0 else "mscale_all_dim", "a number of at least 0")
    if factor * context > LARGEST:
        nested.refuse("factor", f"a context of at most {LARGEST:,}, and not {factor * context:.3g}")
    ratio = yarn_attention(factor, m) / yarn_attention(factor, m_all) if m and m_all else None
    attention = _positive(nested, "attention_factor", ratio or yarn_attention(factor))
    truncate = nested.flag("truncate", default=True)
    return YarnScaling(theta, factor, context, fast, slow, truncate, attention)


def _original_context(fields: Fields, nested: Fields) -> int:
    """Read the context length before scaling; the outer field takes precedence."""
    name = "original_max_position_embeddings"
    level = fields if name in fields else nested
    return level.integer(name, default=fields.integer("max_position_embeddings"))


def _positive(fields: Fields, name: str, default: float | None = None) -> float:
    value = fields.number(name, default=default)
    if not 1 / MOST_SCALED <= value <= MOST_SCALED:
        fields.refuse(name, f"a number above 0 (from {1 / MOST_SCALED:g} to {MOST_SCALED:g})")
    return value


def rotated_width(fields: Fields, head_dim: int, *, partial: float) -> int:
    """Read the rotated width of a head; `partial` is the default of `partial_rotary_factor`."""
    width = int(head_dim * fields.number("partial_rotary_factor", default=partial))
    if width % 2 or not 0 < width <= head_dim:
        fields.refuse("partial_rotary_factor", f"an even number of rotated entries in a head of {head_dim}")
    return width


def window(fields: Fields, *, default: int | None = None) -> int:
    """Read the sliding window in tokens, including the token itself."""
    if fields.null("sliding_window"):
        default = None
    return fields.integer("sliding_window", default=default)


def kv_heads(fields: Fields, heads: int, *, required: bool) -> int:
    """Read the number of key and value heads; null means one per query head."""
    optional = not required or fields.null("num_key_value_heads")
    return fields.integer("num_key_value_heads", default=heads if optional else None)


def attention(
    fields: Fields,
    *,
    norm: Norm | None = None,
    norm_whole: bool = False,
    gated: bool = False,
    rotates: bool = True,
    partial: float | None = None,
    head_dim: int | None = None,
    kv_heads_required: bool = True,
    theta: float = 10_000.0,
    scale: float | None = None,
) -> Attention:
    """Read attention with or without rotary positions and norms on each query and key head.

    `partial` is as in `rope`. `head_dim` is the default of that field; None: `hidden_size` divided by the
    heads. With `kv_heads_required`, a file without `num_key_value_heads` is refused, because transformers'
    class has its own default. `scale` replaces the score scale of the head size.
    """
    fields.divides("num_key_value_heads", "num_attention_heads")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=head_dim or fields.integer("hidden_size") // heads)
    return Attention(
        heads=heads,
        kv_heads=kv_heads(fields, heads, required=kv_heads_required),
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        rope=rope(fields, head_dim, partial=partial, theta=theta) if rotates else None,
        qk_norm=norm,
        norm_whole=norm_whole,
        gated=gated,
        bias=fields.flag("attention_bias", default=False),
    )


def delta_net(fields: Fields, *, eps: float) -> GatedDeltaNet:
    """Read a gated delta net from the `linear_*` fields."""
    fields.divides("linear_num_key_heads", "linear_num_value_heads")
    return GatedDeltaNet(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv=fields.integer("linear_conv_kernel_dim", default=4),
        eps=eps,
    )


def mamba2(fields: Fields, *, eps: float, inner: int | None = None) -> Mamba2:
    """Read Mamba-2 from the `mamba_*` fields; `inner` is the width of x, by default from `mamba_expand`."""
    if inner is None:
        inner = fields.integer("mamba_expand", default=2) * fields.integer("hidden_size")
    heads, groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups", default=1)
    if heads % groups:
        fields.refuse("mamba_n_heads", f"a multiple of mamba_n_groups ({groups})")
    head_width = fields.get("mamba_d_head")
    head_dim = inner // heads if head_width in (None, "auto") else fields.integer("mamba_d_head")
    if heads * head_dim != inner:
        fields.refuse("mamba_n_heads", f"heads (of mamba_d_head) that make up the width of x ({inner})")
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=fields.integer("mamba_d_state"),
        conv=fields.integer("mamba_d_conv", default=4),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias", default=False),
        eps=eps,
        step_limit=step_limit(fields),
    )


def step_rank(fields: Fields, name: str) -> int:
    """Read the rank of Mamba-1's step size projection."""
    if fields.get(name) in (None, "auto"):
        return -(-fields.integer("hidden_size") // 16)
    return fields.integer(name)


def step_limit(fields: Fields) -> tuple[float, float]:
    """Read the bounds of Mamba-2's step size."""
    bounds = fields.get("time_step_limit")
    if bounds is None:
        return 0.0, math.inf
    numbers = isinstance(bounds, list | tuple) and all(type(bound) in (int, float) for bound in bounds)
    if not numbers or len(bounds) != 2 or not bounds[0] <= bounds[1]:
        fields.refuse("time_step_limit", "two numbers, the smaller one first")
    return float(bounds[0]), float(bounds[1])


def swiglu(fields: Fields, width: str = "intermediate_size", *, bias: bool = False) -> MLP:
    """Read a dense feed-forward."""
    fields.only("hidden_act", "silu")
    return MLP(fields.integer(width), "swiglu", bias=bias)


def softmax_moe(
    fields: Fields, *, renormalise: bool, experts: str = "num_experts", shared: bool = True
) -> MoE:
    """Read a mixture of gated experts with a softmax router and an optional gated shared expert."""
    fields.only("hidden_act", "silu")
    width = fields.integer("shared_expert_intermediate_size", least=0) if shared else 0
    return MoE(
        experts=fields.integer(experts),
        top_k=top_k(fields, experts),
        width=fields.integer("moe_intermediate_size"),
        activation="swiglu",
        router="softmax",
        renormalise=renormalise,
        shared_width=width,
        shared_gate=width > 0,
    )


def is_sparse(fields: Fields, layer: int) -> bool:
    """Return whether a layer has experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step, dense = fields.integer("decoder_sparse_step", default=1), fields.integers("mlp_only_layers")
    return (layer + 1) % step == 0 and layer not in dense


def feed_forwards(fields: Fields, *, dense: int) -> tuple[str, ...]:
    """Return each layer's feed-forward kind: `mlp_layer_types`, else experts after the first few layers."""
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = fields.strings("mlp_layer_types")
    if kinds is None:
        dense = fields.integer("first_k_dense_replace", default=dense, least=0)
        return tuple(DENSE if i < dense else SPARSE for i in range(count))
    if len(kinds) != count or not set(kinds) <= {DENSE, SPARSE}:
        fields.refuse("mlp_layer_types", f"{DENSE} or {SPARSE} for each of {count} layers")
    return kinds


def grouped_moe(fields: Fields, *, groups: int = 1, top_groups: int = 1, scale: float) -> MoE:
    """Read experts in groups, of which a token visits a few, and shared experts."""
    experts = fields.integer("num_experts")
    groups = fields.integer("num_expert_group", "n_group", default=groups)
    top_groups = fields.integer("topk_group", default=top_groups)
    visited = fields.integer("num_experts_per_token", "num_experts_per_tok")
    spelling = "n_group" if "num_expert_group" not in fields and "n_group" in fields else "num_expert_group"
    if experts % groups or experts // groups < 2:
        fields.refuse(spelling, f"groups of two experts at least that share num_experts ({experts}) evenly")
    if top_groups > groups:
        fields.refuse("topk_group", f"no more groups than there are ({groups})")
    if visited > experts // groups * top_groups:
        name = "num_experts_per_token" if "num_experts_per_token" in fields else "num_experts_per_tok"
        fields.refuse(name, "no more experts than the chosen groups (topk_group) hold")
    width = fields.integer("moe_intermediate_size")
    return MoE(
        experts=experts,
        top_k=visited,
        width=width,
        activation="swiglu",
        router="sigmoid",
        renormalise=fields.flag("moe_renormalize", "norm_topk_prob", default=True),
        shared_width=width * fields.integer("num_shared_experts", "n_shared_experts", default=1, least=0),
        shared_gate=False,
        scale=fields.number("routed_scaling_factor", default=scale),
        groups=groups,
        top_groups=top_groups,
    )


def top_k(fields: Fields, experts: str) -> int:
    """Read the number of experts per token."""
    chosen = fields.integer("num_experts_per_tok")
    if chosen > fields.integer(experts):
        fields.refuse("num_experts_per_tok", f"at most {experts} ({fields.integer(experts)})")
    return chosen


def text_fields(config: Fields) -> Fields:
    """Return the language model's level of a multimodal config, or the config itself."""
    name = next((name for name in TEXT if name in config), None)
    return config.within(name) if name else config


def assemble(
    family: str,
    config: Fields,
    layers: tuple[LayerSpec, ...],
    norm: Norm,
    *,
    mtp: tuple[LayerSpec, ...] = (),
    tied: bool = False,
    max_length: int | None = None,
    embed_scale: float = 1.0,
    logit_scale: float = 1.0,
    wide_residual: bool = False,
) -> NetworkSpec:
    """Build a network from its layers and the fields that every family shares.

    The outer level of a multimodal config decides on tying, as in transformers; `tied` is the family's
    default. `max_length` is for families whose config has no bound.
    """
    text = text_fields(config)
    vocab = text.integer("vocab_size")
    return NetworkSpec(
        family=family,
        vocab=vocab,
        hidden=text.integer("hidden_size"),
        layers=layers,
        norm=norm,
        tied=config.flag(*TIED, default=text.flag(*TIED, default=tied)),
        max_length=max(text.integer("max_position_embeddings", default=max_length), *_longer(layers), 1),
        eos=config.tokens("eos_token_id", vocab) or text.tokens("eos_token_id", vocab),
        mtp=mtp,
        embed_scale=embed_scale,
        logit_scale=logit_scale,
        wide_residual=wide_residual,
    )


def _longer(layers: tuple[LayerSpec, ...]) -> set[int]:
    """Return the contexts that YaRN extends to; published configs may state the original one."""
    ropes = (rope for layer in layers for mixer in layer.mixers for rope in mixer.ropes())
    return {rope.scaling.length for rope in ropes if isinstance(rope.scaling, YarnScaling)}


def head_wanted(fields: Fields, *, default: bool) -> bool:
    """Return whether a config announces a multi-token head."""
    count = fields.integer("mtp_num_hidden_layers", "num_nextn_predict_layers", default=int(default), least=0)
    if count:
        fields.only("mtp_use_dedicated_embeddings", False)
    return count > 0


def model_type(config: Fields) -> str:
    """Return a config's model_type."""
    name = config.get("model_type")
    if not isinstance(name, str):
        raise CheckpointError(
            "config.json has no model_type; specdec reads Hugging Face checkpoints, which name theirs there",
            field="model_type",
        )
    return name
