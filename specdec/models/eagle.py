"""Published EAGLE draft heads: detect a folder's layout and map its tensors.

EAGLE-1 and 2: `fc` [D, 2D] combines the token's embedding with the previous hidden state after the target's
final norm. `layers.0` reads the result without a norm of its own. The target's output head ranks its output.

EAGLE-3: `fc` [D, 3D] fuses three residual streams of the target, once. `midlayer` reads the normalised
embedding concatenated with the normalised fusion; its output, before `norm`, is its next input. `lm_head`
ranks part of the vocabulary; draft id i is token i + d2t[i].

EAGLE-3.1 (`fc_norm`, `norm_output`) normalises each stream before `fc`, and feeds back the output of `norm`.
Further layers are ordinary. Folders of speculators keep the layers' fields in `transformer_layer_config`.
"""

from dataclasses import replace

from specdec.errors import CheckpointError
from specdec.models import spec
from specdec.models.blocks import MOST_LAYERS, attention, refuse_unsupported, swiglu
from specdec.models.checkpoint import Checkpoint, few
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

EXPECTED = (
    "fc.weight with layers.0.self_attn.q_proj.weight (EAGLE-1, EAGLE-2), "
    "or with midlayer.hidden_norm.weight (EAGLE-3)"
)
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


def read_eagle(checkpoint: Checkpoint, target: spec.NetworkSpec) -> HeadFolder:
    """Describe an EAGLE head, checked against its target."""
    names, fields = frozenset(checkpoint.names()), Fields(checkpoint.config)
    if (stored := announced(fields)) and stored.packed:
        fields.refuse("quantization_config", "a head that is stored in 16 bits or 8-bit floats")
    layout, fuses = _layout(checkpoint, names)
    fields.only(KIND, *KINDS)
    layer = layer_fields(fields)
    refuse_unsupported(layer)
    count = layer.integer("num_hidden_layers", default=1, most=MOST_LAYERS)
    for name in ("add_para_norm", "parallel_drafting"):
        fields.absent(name, "a head of the published EAGLE-1 to 3.1 (false)")
    fields.within("eagle_config").only("use_aux_hidden_state", fuses)
    options = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    for name in () if fuses else options:
        fields.absent(name, "a head of EAGLE-3, which has this option (false)")
    residual, joined, each, output = (fields.flag(name, default=False) for name in options)

    def has(ours: str) -> bool:
        return any(source.present(names, 1) for source in layout.sources(ours, layout.prefix(names)))

    separate = fuses and has("embed.weight") and has("head.weight")
    width = check_width(fields, layer, target, separate=separate)
    norm = Norm(layer.number("rms_norm_eps"), wide=False)
    mixer = replace(
        attention(layer, norm=norm, gated=False, partial=1.0, kv_heads_required=False),
        qk_norm=norm if has("layers.0.mixer.q_norm.weight") else None,
        bias=has("layers.0.mixer.q.bias"),
        out_bias=has("layers.0.mixer.o.bias"),
    )
    vocab = vocab_of(layer, target, embeds=has("embed.weight"))
    ranked = fields.integer("draft_vocab_size", default=vocab if has("head.weight") else target.vocab)
    ids_C = draft_ids(checkpoint, fields, ranked, target.vocab)
    layer_spec = spec.LayerSpec((mixer,), swiglu(layer))
    head = spec.Eagle(
        width=width,
        vocab=vocab,
        layers=(replace(layer_spec, reads=2 * width if fuses else width), *[layer_spec] * (count - 1)),
        norm=norm,
        aux_hidden_layers=_aux_hidden_layers(fields, len(target.layers)) if fuses else (),
        target_width=target.hidden,
        ranked=ranked,
        fc_bias=has("fc.bias"),
        own_embed=has("embed.weight"),
        own_head=has("head.weight") or ids_C is not None,
        normed_residual=residual,
        norms_each=each,
        norms_joined=joined,
        returns_normed=output,
    )
    return HeadFolder(checkpoint, head, layout, ids_C)


def _layout(checkpoint: Checkpoint, names: frozenset[str]) -> tuple[CheckpointLayout, bool]:
    """Detect the tensor layout; return it and whether it is EAGLE-3's."""
    prefix = next((p for p in ("", "model.") if f"{p}fc.weight" in names), None)
    for layer in ("midlayer.", "layers.0."):
        if prefix is not None and f"{prefix}{layer}self_attn.q_proj.weight" in names:
            fuses = f"{prefix}{layer}hidden_norm.weight" in names
            if fuses or layer == "layers.0.":
                return _table(f"~{layer}", fuses=fuses), fuses
    kind = checkpoint.config.get("architectures") or checkpoint.config.get("model_type")
    raise CheckpointError(
        f"{checkpoint.folder} holds no EAGLE head that specdec knows: its config.json says {kind!r}, and its "
        f"tensors are {few(sorted(names)) or 'none'}; expected is {EXPECTED}",
        field="draft_model",
    )


def _table(layer: str, *, fuses: bool) -> CheckpointLayout:
    """Return the layout of a head whose layer has this prefix."""
    fused = (
        TensorRule(r"embed_norm\.weight", f"{layer}input_layernorm.weight"),
        TensorRule(r"hidden_norm\.weight", f"{layer}hidden_norm.weight"),
        TensorRule(r"norm\.weight", "~norm.weight"),
        TensorRule(r"(input_norm|fc_norm\.\d+)\.weight", r"~\1.weight"),
    )
    layers = ((r"layers\.(0)\.", layer), (r"layers\.([1-9]\d*)\.", r"~layers.\1."))
    return CheckpointLayout(
        rules=(
            TensorRule(r"embed\.weight", "~embed_tokens.weight"),
            TensorRule(r"head\.weight", "lm_head.weight"),
            TensorRule(r"head\.weight", "~lm_head.weight"),
            TensorRule(r"fc\.(weight|bias)", r"~fc.\1"),
            *(rule for names in layers for rule in layer_rules(*names)),
            *(fused if fuses else ()),
        ),
        prefixes=("", "model."),
        embedding="fc.weight",
        ignored=(r".*\.inv_freq", r"(.*\.)?(d2t|t2d)"),
    )


def _aux_hidden_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers whose input residual streams are fused.

    Two conventions are published. A list that begins with 1, unless speculators wrote it, names layers by
    their outputs; any other by their inputs, as does the default: layers 2, N // 2 and N - 3.
    """
    nested = fields.within("eagle_config")
    level = nested if _AUX_LAYERS in nested else fields
    ids = level.integers(_AUX_LAYERS) or (2, layers // 2, layers - 3)
    by_outputs = ids[0] == 1 and KIND not in fields
    aux_hidden_layers = tuple(i + 1 for i in ids) if by_outputs else ids
    if not all(0 <= layer <= layers for layer in aux_hidden_layers):
        level.refuse(_AUX_LAYERS, f"layers of a target that has {layers}")
    return aux_hidden_layers
