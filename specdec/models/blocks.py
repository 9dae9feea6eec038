"""Parts of a network from config fields that several families spell the same way."""

from specdec.errors import CheckpointError
from specdec.models.feed_forward import MLP, MoE
from specdec.models.fields import Fields
from specdec.models.formats import announced
from specdec.models.mixers import Attention, GatedDeltaNet
from specdec.models.norm import Norm
from specdec.models.rope import Rope
from specdec.models.spec import Layer, Network

FULL, LINEAR = "full_attention", "linear_attention"

MOST_LAYERS = 1024
"""Each takes memory before the first tensor is looked up; published models have a tenth of them."""

# Names from before the two kinds of layer were called alike everywhere.
_LEGACY_KINDS = {"attention": FULL, "mamba": LINEAR}


def refuse_unsupported(fields: Fields) -> None:
    """Refuse what no family here implements."""
    announced(fields)
    fields.absent("compression_config", "weights that are not compressed: use the original checkpoint")
    fields.absent("use_sliding_window", "full attention (false)")


def layer_kinds(
    fields: Fields, *, supported: tuple[str, ...], interval: int | None = None
) -> tuple[str, ...]:
    """Name each layer's mixer: `layer_types`, or else full attention every `interval` layers."""
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = fields.strings("layer_types", "layers_block_type")
    if kinds is None:
        every = fields.integer("full_attention_interval", default=interval or 1)
        return tuple(FULL if (i + 1) % every == 0 else LINEAR for i in range(count))
    kinds = modern_kinds(kinds)
    if unknown := set(kinds) - set(supported):
        fields.refuse("layer_types", f"only {' and '.join(supported)}, not {', '.join(sorted(unknown))}")
    if len(kinds) != count:
        fields.refuse("layer_types", f"as many entries as num_hidden_layers ({count}), not {len(kinds)}")
    return kinds


def modern_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Translate older names of layer kinds."""
    return tuple(_LEGACY_KINDS.get(kind, kind) for kind in kinds)


def rope(fields: Fields, head_dim: int, *, partial: float) -> Rope:
    """Read rotary parameters, nested (`rope_parameters`, `rope_scaling`) or at the top level.

    The sections of a multimodal rope are all the same for text, so "mrope" is plain here.
    """
    for name in ("rope_parameters", "rope_scaling"):
        nested = fields.within(name)
        for kind in ("rope_type", "type"):
            nested.only(kind, "default", "mrope")
    nested = fields.within("rope_parameters")
    theta = nested.number("rope_theta", default=fields.number("rope_theta", default=10_000.0))
    if theta <= 0:
        (nested if "rope_theta" in nested else fields).refuse("rope_theta", "a number above 0")
    outer = fields.number("partial_rotary_factor", default=partial)
    dim = int(head_dim * nested.number("partial_rotary_factor", default=outer))
    if dim % 2 or not 0 < dim <= head_dim:
        where = nested if "partial_rotary_factor" in nested else fields
        where.refuse("partial_rotary_factor", f"an even number of rotated entries in a head of {head_dim}")
    return Rope(dim, theta)


def attention(fields: Fields, *, norm: Norm | None, gated: bool, partial: float) -> Attention:
    """Read attention with rotary positions and, if there is one, a norm on each query and key head."""
    fields.divides("num_key_value_heads", "num_attention_heads")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=fields.integer("hidden_size") // heads)
    return Attention(
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(fields, head_dim, partial=partial),
        qk_norm=norm,
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


def swiglu(fields: Fields) -> MLP:
    """Read a dense feed-forward."""
    fields.only("hidden_act", "silu")
    return MLP(fields.integer("intermediate_size"), "swiglu")


def softmax_moe(fields: Fields, *, renormalise: bool) -> MoE:
    """Read a mixture of gated experts under a softmax router, with one gated shared expert."""
    fields.only("hidden_act", "silu")
    shared = fields.integer("shared_expert_intermediate_size", least=0)
    return MoE(
        experts=fields.integer("num_experts"),
        top_k=top_k(fields, "num_experts"),
        width=fields.integer("moe_intermediate_size"),
        activation="swiglu",
        router="softmax",
        renormalise=renormalise,
        shared_width=shared,
        shared_gate=shared > 0,
    )


def top_k(fields: Fields, experts: str) -> int:
    """Read how many experts a token visits."""
    chosen = fields.integer("num_experts_per_tok")
    if chosen > fields.integer(experts):
        fields.refuse("num_experts_per_tok", f"at most {experts} ({fields.integer(experts)})")
    return chosen


def text_fields(config: Fields) -> Fields:
    """Return the language model's level of a multimodal config, or the config itself."""
    return config.within("text_config") if "text_config" in config else config


def assemble(
    family: str, config: Fields, layers: tuple[Layer, ...], norm: Norm, *, mtp: tuple[Layer, ...] = ()
) -> Network:
    """Put a network together from its layers and the fields that every family spells alike.

    The outer level of a multimodal config decides on tying, as transformers does.
    """
    text = text_fields(config)
    vocab = text.integer("vocab_size")
    return Network(
        family=family,
        vocab=vocab,
        hidden=text.integer("hidden_size"),
        layers=layers,
        norm=norm,
        tied=config.flag("tie_word_embeddings", default=text.flag("tie_word_embeddings", default=False)),
        max_length=text.integer("max_position_embeddings"),
        eos=config.tokens("eos_token_id", vocab) or text.tokens("eos_token_id", vocab),
        mtp=mtp,
    )


def head_wanted(fields: Fields, *, default: bool) -> bool:
    """Tell whether a config announces a multi-token head."""
    count = fields.integer("mtp_num_hidden_layers", "num_nextn_predict_layers", default=int(default), least=0)
    if count:
        fields.only("mtp_use_dedicated_embeddings", False)
    return count > 0


def model_type(config: Fields) -> str:
    """Read the name by which a config says what it is."""
    name = config.get("model_type")
    if not isinstance(name, str):
        raise CheckpointError(
            "config.json has no model_type; specdec reads Hugging Face checkpoints, which name theirs there",
            field="model_type",
        )
    return name
