"""Published block heads (DFlash, JetSpec, DSpark): detect a folder's layout and map its tensors.

`fc` and `hidden_norm` fuse residual streams of the target. Every layer's `k_proj` and `v_proj` read the
result at accepted positions, and the block's own stream at its tokens. Layers are those of Qwen3. z-lab's
folders rank with the target's output head; those of speculators may have their own, with `d2t`.

DSpark adds `markov_head`: W2 W1[t] is added to the logits after token t. Its confidence is not read: drafts
are as long as pays by their measured acceptance.

A token of a block sees the whole block. Exceptions are causal layers: all with `is_causal` or
`dflash_config.causal` (JetSpec), and by default those with a sliding window, as in vLLM.
"""

from dataclasses import replace

from specdec.config.engine import MAX_WINDOW
from specdec.models import spec
from specdec.models.blocks import (
    FULL,
    SLIDING,
    attention,
    layer_kinds,
    refuse_unsupported,
    swiglu,
)
from specdec.models.checkpoint import Checkpoint
from specdec.models.fields import Fields
from specdec.models.formats import announced
from specdec.models.head_folder import (
    KIND,
    KINDS,
    HeadFolder,
    check_width,
    draft_ids,
    layer_fields,
    layer_rules,
    vocab_of,
)
from specdec.models.layouts import CheckpointLayout, TensorRule
from specdec.models.norm import Norm

NESTED, ARCHITECTURES = "dflash_config", ("DFlashDraftModel", "Qwen3DSparkModel")
KNOWN = (
    *("block_size", "mask_token_id", "target_layer_ids"),
    *("causal", "use_swa", "swa_window_size", "attention_sink_bias"),
)
"""Fields of `dflash_config` that are read or, unless off, refused; any other is refused."""
LAYOUT = CheckpointLayout(
    rules=(
        TensorRule(r"embed\.weight", "~embed_tokens.weight"),
        TensorRule(r"head\.weight", "lm_head.weight"),
        TensorRule(r"head\.weight", "~lm_head.weight"),
        TensorRule(r"(fc|hidden_norm|norm)\.weight", r"~\1.weight"),
        TensorRule(r"transition\.embed\.weight", "~markov_head.markov_w1.weight"),
        TensorRule(r"transition\.head\.weight", "~markov_head.markov_w2.weight"),
        TensorRule(r"context\.(\d+)\.([kv])\.(weight|bias)", r"~layers.\1.self_attn.\2_proj.\3"),
        *layer_rules(r"layers\.(\d+)\.", r"~layers.\1."),
    ),
    prefixes=("", "model."),
    embedding="fc.weight",
    ignored=(r".*\.inv_freq", r"(.*\.)?(d2t|t2d|mask_embedding|confidence_head\.proj\.(weight|bias))"),
)


def is_block(checkpoint: Checkpoint) -> bool:
    """Return whether a head's config describes a block head, of whichever kind."""
    fields = Fields(checkpoint.config)
    kinds = (*(fields.strings("architectures") or ()), str(fields.get(KIND)))
    named = any(name in kind.lower() for kind in kinds for name in ("dflash", "dspark"))
    return named or NESTED in fields


def read_block(checkpoint: Checkpoint, target: spec.NetworkSpec) -> HeadFolder:
    """Describe a block head, checked against its target."""
    names, fields = frozenset(checkpoint.names()), Fields(checkpoint.config)
    layer, nested = layer_fields(fields), fields.within(NESTED)
    if KIND in fields:
        fields.only(KIND, *KINDS)
        is_dspark = fields.get(KIND) == "dspark"
    else:
        kind = (fields.strings("architectures") or ARCHITECTURES)[0]
        if kind not in ARCHITECTURES:
            fields.refuse("architectures", " or ".join(f"['{name}']" for name in ARCHITECTURES))
        is_dspark = kind == ARCHITECTURES[1]
    if (stored := announced(fields)) and stored.packed:
        fields.refuse("quantization_config", "a head that is stored in 16 bits or 8-bit floats")
    _refuse_options(fields, layer, nested)
    for name in () if is_dspark else ("markov_rank", "markov_head_type"):
        fields.absent(name, "a head of DSpark, which has this option, or none (false)")

    def has(ours: str) -> bool:
        return any(source.present(names, 1) for source in LAYOUT.sources(ours, LAYOUT.prefix(names)))

    width = check_width(fields, layer, target, separate=has("embed.weight") and has("head.weight"))
    vocab = vocab_of(layer, target, embeds=has("embed.weight") or is_dspark)
    ranked = fields.integer("draft_vocab_size", default=vocab if has("head.weight") else target.vocab)
    ids_C = draft_ids(checkpoint, fields, ranked, target.vocab)
    norm = Norm(layer.number("rms_norm_eps"), wide=False)
    mixer = replace(
        attention(layer, norm=norm, gated=False, partial=1.0, kv_heads_required=False),
        qk_norm=norm if has("layers.0.mixer.q_norm.weight") else None,
        bias=has("layers.0.mixer.q.bias"),
        out_bias=has("layers.0.mixer.o.bias"),
    )
    windows, causal = _windows(fields, layer, nested)
    sized = nested if "block_size" in nested else fields
    masked = nested if "mask_token_id" in nested else fields
    block = sized.integer("block_size", least=2, most=MAX_WINDOW)
    from_anchor = fields.flag("sample_from_anchor", default=is_dspark)
    head = spec.Block(
        width=width,
        vocab=vocab,
        layers=tuple(spec.LayerSpec((replace(mixer, window=window),), swiglu(layer)) for window in windows),
        norm=norm,
        aux_hidden_layers=_streams(fields, nested, len(target.layers), len(windows)),
        target_width=target.hidden,
        ranked=ranked,
        own_embed=has("embed.weight"),
        own_head=has("head.weight") or ids_C is not None,
        block=block,
        mask=masked.integer(
            "mask_token_id", least=0, most=(vocab if has("embed.weight") else target.vocab) - 1
        ),
        causal=causal,
        first=0 if from_anchor else 1,
        transitions=_transitions(fields) if is_dspark else 0,
    )
    return HeadFolder(checkpoint, head, LAYOUT, ids_C)


def _refuse_options(fields: Fields, layer: Fields, nested: Fields) -> None:
    """Refuse options that change what the head computes and are not read."""
    refuse_unsupported(layer, slides=True)
    plain = "a head of DFlash without this option (false)"
    for name in ("sliding_window_non_causal", "final_logit_softcapping", "add_swa_attention_sink_bias"):
        fields.absent(name, plain)
    nested.absent("attention_sink_bias", plain)
    fields.only("logit_scale", 1)
    fields.only("is_neox_style", True)
    for name in nested.names():
        if name not in KNOWN:
            nested.absent(name, plain)
    if layer.null("rope_theta") or not ("rope_theta" in layer or layer.within("rope_parameters").names()):
        layer.refuse("rope_theta", "the base of the rotary positions: libraries assume different ones")


def _transitions(fields: Fields) -> int:
    """Return the rank of the transitions' bias."""
    fields.only("markov_head_type", "vanilla")
    fields.only("draft_adapter_rank", 0)
    return fields.integer("markov_rank", least=0)


def _windows(
    fields: Fields, layer: Fields, nested: Fields
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return each layer's sliding window, and whether it is causal within a block."""
    kinds = layer_kinds(layer, supported=(FULL, SLIDING), default=FULL)
    if nested.flag("use_swa", default=False) and SLIDING not in kinds:
        kinds = (SLIDING,) * len(kinds)
        if not _causal(fields, nested, default=False):
            nested.refuse("use_swa", "causal layers (dflash_config.causal), or none with a sliding window")
    if "use_sliding_window" in layer and layer.flag("use_sliding_window", default=False) != (
        SLIDING in kinds
    ):
        layer.refuse("use_sliding_window", "the same as layer_types, which lists the layers with a window")
    causal = tuple(_causal(fields, nested, default=kind == SLIDING) for kind in kinds)
    size: int | None = None
    if SLIDING in kinds:
        size = (nested if "swa_window_size" in nested else layer).integer(
            "swa_window_size" if "swa_window_size" in nested else "sliding_window"
        )
        if not all(flag for flag, kind in zip(causal, kinds, strict=True) if kind == SLIDING):
            level, name = (fields, "is_causal") if "is_causal" in fields else (nested, "causal")
            level.refuse(name, "causal layers (true) where layer_types has a sliding window")
    return tuple(size if kind == SLIDING else None for kind in kinds), causal


def _causal(fields: Fields, nested: Fields, *, default: bool) -> bool:
    return fields.flag("is_causal", default=nested.flag("causal", default=default))


def _streams(fields: Fields, nested: Fields, layers: int, depth: int) -> tuple[int, ...]:
    """Return the layers whose input streams are fused.

    z-lab names layers by their outputs, speculators by their inputs.
    """
    if KIND in fields:
        level, name, streams = (
            fields,
            "aux_hidden_state_layer_ids",
            fields.integers("aux_hidden_state_layer_ids"),
        )
    else:
        level, name = nested if "target_layer_ids" in nested else fields, "target_layer_ids"
        fields.only("num_target_layers", layers)
        streams = tuple(i + 1 for i in level.integers(name) or _spread(layers, depth))
    # Libraries disagree on whether the last layer's output is normalised.
    if not streams or not all(0 <= stream < layers for stream in streams):
        level.refuse(name, f"layers before the last of a target that has {layers}")
    return streams


def _spread(layers: int, depth: int) -> list[int]:
    """Return the default of `target_layer_ids`: evenly spread from the second layer to the third last."""
    if depth == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (depth - 1)) for i in range(depth)]
