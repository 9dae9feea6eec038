"""Published EAGLE draft heads: detect a folder's layout and map its tensors.

EAGLE-1 and 2: `fc` [D, 2D] combines the token's embedding with the previous hidden state after the target's
final norm. `layers.0` reads the result without a norm of its own. The target's output head ranks its output.

EAGLE-3: `fc` [D, 3D] fuses three residual streams of the target, once. `midlayer` reads the normalised
embedding concatenated with the normalised fusion; its output, before `norm`, is its next input. `lm_head`
ranks part of the vocabulary; draft id i is token i + d2t[i].
"""

import logging
import os.path
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models import spec
from specdec.models.blocks import attention, refuse_unsupported, swiglu
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
        return (self.spec.layer,)

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


def read_head(folder: Path, target: spec.NetworkSpec) -> EagleFolder:
    """Describe the head in a folder; every error begins with draft_model."""
    try:
        return _read(Checkpoint(folder), target)
    except CheckpointError as error:
        field = "draft_model" if error.field == "model" else error.field
        raise CheckpointError(f"draft_model: {error}", field=field) from error


def _read(checkpoint: Checkpoint, target: spec.NetworkSpec) -> EagleFolder:
    names, fields = frozenset(checkpoint.names()), Fields(checkpoint.config)
    if (stored := announced(fields)) and stored.packed:
        fields.refuse("quantization_config", "a head that is stored in 16 bits or 8-bit floats")
    layout, fuses = _layout(checkpoint, names)
    refuse_unsupported(fields)
    if fields.integer("num_hidden_layers", default=1) != 1:
        fields.refuse("num_hidden_layers", "a head of one layer (1)")
    for name in ("add_para_norm", "norm_before_fc", "fc_norm", "norm_output", "parallel_drafting"):
        fields.absent(name, "a head of the published EAGLE-1 to 3 (false)")
    fields.within("eagle_config").only("use_aux_hidden_state", fuses)

    def has(ours: str) -> bool:
        return any(source.present(names, 1) for source in layout.sources(ours, layout.prefix(names)))

    width = fields.integer("hidden_size")
    fields.only("target_hidden_size", target.hidden)
    if width != target.hidden and not (fuses and has("embed.weight") and has("head.weight")):
        needed = f"the target's width ({target.hidden})"
        fields.refuse("hidden_size", f"{needed}, or EAGLE-3 with embed_tokens and lm_head of its own")
    norm = Norm(fields.number("rms_norm_eps"), wide=False)
    mixer = replace(
        attention(fields, norm=norm, gated=False, partial=1.0, kv_heads_required=False),
        qk_norm=norm if has("layers.0.mixer.q_norm.weight") else None,
        bias=has("layers.0.mixer.q.bias"),
        out_bias=has("layers.0.mixer.o.bias"),
    )
    vocab = fields.integer("vocab_size", default=target.vocab)
    if has("embed.weight") and vocab < target.vocab:
        fields.refuse("vocab_size", f"an embedding of all {target.vocab} tokens of the target")
    ranked = fields.integer("draft_vocab_size", default=vocab if has("head.weight") else target.vocab)
    ids_C = _ids(checkpoint, fields, ranked, target.vocab)
    head = spec.Eagle(
        width=width,
        vocab=vocab,
        layer=spec.LayerSpec((mixer,), swiglu(fields), reads=2 * width if fuses else width),
        norm=norm,
        aux_hidden_layers=_aux_hidden_layers(fields, len(target.layers)) if fuses else (),
        target_width=target.hidden,
        ranked=ranked,
        fc_bias=has("fc.bias"),
        own_embed=has("embed.weight"),
        own_head=has("head.weight") or ids_C is not None,
        normed_residual=fuses and fields.flag("norm_before_residual", default=False),
    )
    return EagleFolder(checkpoint, head, layout, ids_C)


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
    ours = r"layers\.0\."
    fused = (
        TensorRule(r"embed_norm\.weight", f"{layer}input_layernorm.weight"),
        TensorRule(r"hidden_norm\.weight", f"{layer}hidden_norm.weight"),
        TensorRule(r"norm\.weight", "~norm.weight"),
    )
    return CheckpointLayout(
        rules=(
            TensorRule(r"embed\.weight", "~embed_tokens.weight"),
            TensorRule(r"head\.weight", "lm_head.weight"),
            TensorRule(r"head\.weight", "~lm_head.weight"),
            TensorRule(r"fc\.(weight|bias)", r"~fc.\1"),
            TensorRule(rf"{ours}ffn_norm\.weight", f"{layer}post_attention_layernorm.weight"),
            TensorRule(rf"{ours}mixer\.([qkvo])\.(weight|bias)", rf"{layer}self_attn.\1_proj.\2"),
            TensorRule(rf"{ours}mixer\.([qk])_norm\.weight", rf"{layer}self_attn.\1_norm.weight"),
            TensorRule(rf"{ours}ffn\.(gate|up|down)\.weight", rf"{layer}mlp.\1_proj.weight"),
            *(fused if fuses else ()),
        ),
        prefixes=("", "model."),
        embedding="fc.weight",
        ignored=(r".*\.inv_freq", r"(.*\.)?(d2t|t2d)"),
    )


def _aux_hidden_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers whose input residual streams are fused.

    Two conventions are published. A list that begins with 1 names layers by their outputs; any other by their
    inputs, as does the default: layers 2, N // 2 and N - 3. Neither can name the output of layer 0.
    """
    nested = fields.within("eagle_config")
    where = nested if _AUX_LAYERS in nested else fields
    ids = where.integers(_AUX_LAYERS) or (2, layers // 2, layers - 3)
    aux_hidden_layers = tuple(i + 1 for i in ids) if ids[0] == 1 else ids
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
            logger.warning("%s marks other tokens than d2t names; those of d2t are drafted", name)
