"""Published EAGLE draft heads: detect a folder's layout and map its tensors.

EAGLE-1 and 2: `fc` [D, 2D] combines the token's embedding with the previous hidden state after the target's
final norm. `layers.0` reads the result without a norm of its own. The target's output head ranks its output.

EAGLE-3: `fc` [D, 3D] fuses three residual streams of the target, once. `midlayer` reads the normalised
embedding concatenated with the normalised fusion; its output, before `norm`, is its next input. `lm_head`
ranks part of the vocabulary; draft id i is token i + d2t[i].

EAGLE-3.1 (`fc_norm`, `norm_output`) normalises each stream before `fc`, and feeds back the output of `norm`.
Further layers are ordinary. Folders of speculators keep the layers' fields in `transformer_layer_config`.
"""

import logging
import os.path
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models import spec
from specdec.models.blocks import MOST_LAYERS, attention, refuse_unsupported, swiglu
from specdec.models.checkpoint import Checkpoint, few
from specdec.models.checkpoint_weights import CheckpointWeights
from specdec.models.eagle_head import EagleHead
from specdec.models.fields import Fields
from specdec.models.files import HEAD_FOLDERS
from specdec.models.formats import WeightFormat, announced
from specdec.models.layouts import CheckpointLayout, TensorRule
from specdec.models.network import Network
from specdec.models.norm import Norm
from specdec.models.weights import Weights

logger = logging.getLogger(__name__)

EXPECTED = (
    "fc.weight with layers.0.self_attn.q_proj.weight (EAGLE-1, EAGLE-2), "
    "or with midlayer.hidden_norm.weight (EAGLE-3)"
)
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_KIND = "speculators_model_type"
Layers = tuple[spec.LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class EagleFolder:
    """A head's folder, checked against its target."""

    checkpoint: Checkpoint
    spec: spec.Eagle
    layout: CheckpointLayout
    ids_C: Tensor | None
    """The tokens that its logits rank; None: all of the target's."""

    @property
    def layers(self) -> Layers:
        return self.spec.layers

    def open(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantize: WeightFormat | None = None,
        headers_only: bool = False,
        progress: bool | None = None,
    ) -> CheckpointWeights:
        """Open the head's tensors by our names."""
        return CheckpointWeights(
            self.checkpoint,
            self.layout,
            dtype=dtype,
            device=device,
            mtp=True,
            announced=announced(Fields(self.checkpoint.config)),
            quantize=quantize,
            headers_only=headers_only,
            progress=progress,
        )

    def fill(self, target: Network, weights: Weights, *, max_length: int) -> EagleHead:
        """Build the head from its tensors."""
        return EagleHead(self.spec, target, weights, self.ids_C, max_length=max_length)

    def finish(self, weights: CheckpointWeights) -> None:
        """Finish the weights; errors about tensors name the head."""
        try:
            weights.finish()
        except CheckpointError as error:
            where = f"draft_model: {self.checkpoint.folder} is no head for this target"
            raise CheckpointError(f"{where}: {error}", field="draft_model") from error


def find_head(model: str | Path, draft: str, draft_model: str | None) -> Path | None:
    """Return the draft head's folder: as configured, or for eagle also in the model's folder."""
    if draft_model is not None:
        return Path(draft_model)
    own = (Path(model) / name for name in HEAD_FOLDERS)
    return next((folder for folder in own if os.path.isdir(folder)), None) if draft == "eagle" else None


def read_head(folder: Path, target: spec.NetworkSpec, architectures: Sequence[str] = ()) -> EagleFolder:
    """Describe the head in a folder; every error begins with draft_model.

    Warn if the head names other architectures of its target than these.
    """
    try:
        checkpoint = Checkpoint(folder)
        found = _read(checkpoint, target)
        named = Fields(checkpoint.config).within("speculators_config").within("verifier")
        verifiers = named.strings("architectures") or ()
        if architectures and verifiers and not set(architectures) & set(verifiers):
            logger.warning(
                "draft_model: the head was trained for %s, and this model is %s; few of its drafts may be "
                "accepted",
                ", ".join(verifiers),
                ", ".join(architectures),
            )
        return found
    except CheckpointError as error:
        field = "draft_model" if error.field == "model" else error.field
        raise CheckpointError(f"draft_model: {error}", field=field) from error


def _read(checkpoint: Checkpoint, target: spec.NetworkSpec) -> EagleFolder:
    names, fields = frozenset(checkpoint.names()), Fields(checkpoint.config)
    if (stored := announced(fields)) and stored.packed:
        fields.refuse("quantization_config", "a head that is stored in 16 bits or 8-bit floats")
    layout, fuses = _layout(checkpoint, names)
    layer = _layer_fields(fields)
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

    width = layer.integer("hidden_size")
    fields.only("target_hidden_size", target.hidden)
    if width != target.hidden and not (fuses and has("embed.weight") and has("head.weight")):
        needed = f"the target's width ({target.hidden})"
        layer.refuse("hidden_size", f"{needed}, or EAGLE-3 with embed_tokens and lm_head of its own")
    norm = Norm(layer.number("rms_norm_eps"), wide=False)
    mixer = replace(
        attention(layer, norm=norm, gated=False, partial=1.0, kv_heads_required=False),
        qk_norm=norm if has("layers.0.mixer.q_norm.weight") else None,
        bias=has("layers.0.mixer.q.bias"),
        out_bias=has("layers.0.mixer.o.bias"),
    )
    vocab = layer.integer("vocab_size", default=target.vocab)
    if has("embed.weight") and vocab < target.vocab:
        layer.refuse("vocab_size", f"an embedding of all {target.vocab} tokens of the target")
    ranked = fields.integer("draft_vocab_size", default=vocab if has("head.weight") else target.vocab)
    ids_C = _ids(checkpoint, fields, ranked, target.vocab)
    ordinary = spec.LayerSpec((mixer,), swiglu(layer))
    head = spec.Eagle(
        width=width,
        vocab=vocab,
        layers=(replace(ordinary, reads=2 * width if fuses else width), *[ordinary] * (count - 1)),
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
    return EagleFolder(checkpoint, head, layout, ids_C)


def _layer_fields(fields: Fields) -> Fields:
    """Return the fields of the head's layers: the config's own, or those that speculators nests."""
    if _KIND not in fields:
        return fields
    fields.only(_KIND, "eagle3")
    return fields.within("transformer_layer_config")


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
            *(rule for own in layers for rule in _layer_rules(*own)),
            *(fused if fuses else ()),
        ),
        prefixes=("", "model."),
        embedding="fc.weight",
        ignored=(r".*\.inv_freq", r"(.*\.)?(d2t|t2d)"),
    )


def _layer_rules(ours: str, disk: str) -> Iterator[TensorRule]:
    """Yield the rules of layers by our prefix, whose group is their number, and the disk's."""
    yield TensorRule(rf"{ours}mixer_norm\.weight", f"{disk}input_layernorm.weight")
    yield TensorRule(rf"{ours}ffn_norm\.weight", f"{disk}post_attention_layernorm.weight")
    yield TensorRule(rf"{ours}mixer\.([qkvo])\.(weight|bias)", rf"{disk}self_attn.\2_proj.\3")
    yield TensorRule(rf"{ours}mixer\.([qk])_norm\.weight", rf"{disk}self_attn.\2_norm.weight")
    yield TensorRule(rf"{ours}ffn\.(gate|up|down)\.weight", rf"{disk}mlp.\2_proj.weight")


def _aux_hidden_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers whose input residual streams are fused.

    Two conventions are published. A list that begins with 1, unless speculators wrote it, names layers by
    their outputs; any other by their inputs, as does the default: layers 2, N // 2 and N - 3.
    """
    nested = fields.within("eagle_config")
    where = nested if _AUX_LAYERS in nested else fields
    ids = where.integers(_AUX_LAYERS) or (2, layers // 2, layers - 3)
    by_outputs = ids[0] == 1 and _KIND not in fields
    aux_hidden_layers = tuple(i + 1 for i in ids) if by_outputs else ids
    if not all(0 <= layer <= layers for layer in aux_hidden_layers):
        where.refuse(_AUX_LAYERS, f"layers of a target that has {layers}")
    return aux_hidden_layers


def _ids(checkpoint: Checkpoint, fields: Fields, ranked: int, vocab: int) -> Tensor | None:
    """Return the token of each draft id; None: ids are the target's."""
    name = next((name for name in checkpoint.names() if re.fullmatch(r"(.*\.)?d2t", name)), None)
    if name is None:
        if ranked != vocab:
            fields.refuse("draft_vocab_size", f"the target's ({vocab}), as there is no tensor d2t")
        return None
    offset_C = checkpoint.tensor(name)
    if offset_C.shape != (ranked,) or offset_C.is_floating_point():
        raise CheckpointError(f"{name} is no list of {ranked} integers (draft_vocab_size)", field=name)
    ids_C = offset_C.long() + torch.arange(ranked)
    if not bool(((ids_C >= 0) & (ids_C < vocab)).all()) or len(set(ids_C.tolist())) < ranked:
        raise CheckpointError(f"{name} names tokens twice, or beyond the target's {vocab}", field=name)
    _compare(checkpoint, name.replace("d2t", "t2d"), ids_C)
    return ids_C


def _compare(checkpoint: Checkpoint, name: str, ids_C: Tensor) -> None:
    """Warn if the mask of a head's tokens disagrees with d2t; training uses the mask, drafting does not."""
    if name not in checkpoint.names():
        return
    mask = checkpoint.tensor(name)
    if mask.dtype == torch.bool and mask.ndim == 1 and mask.any():
        marked = mask.nonzero()[:, 0]
        if not torch.equal(marked, ids_C.sort().values):
            logger.warning("%s disagrees with d2t; using the tokens of d2t", name)
