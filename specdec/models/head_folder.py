"""A draft head in its own folder: its tensors, and what the published layouts share."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models import spec
from specdec.models.block_head import BlockHead
from specdec.models.checkpoint import Checkpoint
from specdec.models.checkpoint_weights import CheckpointWeights
from specdec.models.eagle_head import EagleHead
from specdec.models.fields import Fields
from specdec.models.formats import WeightFormat, announced
from specdec.models.layouts import CheckpointLayout, TensorRule
from specdec.models.network import Network
from specdec.models.weights import Weights

logger = logging.getLogger(__name__)

KIND, KINDS = "speculators_model_type", ("eagle3", "dflash", "dspark")
"""The field of speculators' configs that names a head's kind, and the supported kinds."""
Layers = tuple[spec.LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A head's folder, checked against its target."""

    checkpoint: Checkpoint
    spec: spec.Eagle | spec.Block
    layout: CheckpointLayout
    ids_C: Tensor | None
    """The tokens that its logits rank; None: all of the target's."""

    @property
    def layers(self) -> Layers:
        return self.spec.layers

    @property
    def deepest(self) -> int | None:
        """Return the maximum draft depth, or None if it is unlimited."""
        return self.spec.deepest if isinstance(self.spec, spec.Block) else None

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

    def fill(self, target: Network, weights: Weights, *, max_length: int) -> EagleHead | BlockHead:
        """Build the head from its tensors."""
        if isinstance(self.spec, spec.Block):
            return BlockHead(self.spec, target, weights, self.ids_C, max_length=max_length)
        return EagleHead(self.spec, target, weights, self.ids_C, max_length=max_length)

    def finish(self, weights: CheckpointWeights) -> None:
        """Finish the weights; errors about tensors name the head."""
        try:
            weights.finish()
        except CheckpointError as error:
            prefix = f"draft_model: {self.checkpoint.folder} is no head for this target"
            raise CheckpointError(f"{prefix}: {error}", field="draft_model") from error


def layer_fields(fields: Fields) -> Fields:
    """Return the fields of the head's layers, which speculators' configs nest."""
    return fields.within("transformer_layer_config") if KIND in fields else fields


def check_width(fields: Fields, layer: Fields, target: spec.NetworkSpec, *, separate: bool) -> int:
    """Return the head's width: the target's, unless embedding and output head are `separate`."""
    width = layer.integer("hidden_size")
    fields.only("target_hidden_size", target.hidden)
    if width != target.hidden and not separate:
        needed = f"the target's width ({target.hidden})"
        layer.refuse("hidden_size", f"{needed}, or a head with embed_tokens and lm_head of its own")
    return width


def vocab_of(layer: Fields, target: spec.NetworkSpec, *, embeds: bool) -> int:
    """Return the rows of the head's embedding; one of its own must have all of the target's."""
    vocab = layer.integer("vocab_size", default=target.vocab)
    if embeds and vocab < target.vocab:
        layer.refuse("vocab_size", f"an embedding of all {target.vocab} tokens of the target")
    return vocab


def layer_rules(ours: str, disk: str) -> Iterator[TensorRule]:
    """Yield the rules of layers by our prefix, whose group is their number, and the disk's."""
    yield TensorRule(rf"{ours}mixer_norm\.weight", f"{disk}input_layernorm.weight")
    yield TensorRule(rf"{ours}ffn_norm\.weight", f"{disk}post_attention_layernorm.weight")
    yield TensorRule(rf"{ours}mixer\.([qkvo])\.(weight|bias)", rf"{disk}self_attn.\2_proj.\3")
    yield TensorRule(rf"{ours}mixer\.([qk])_norm\.weight", rf"{disk}self_attn.\2_norm.weight")
    yield TensorRule(rf"{ours}ffn\.(gate|up|down)\.weight", rf"{disk}mlp.\2_proj.weight")


def draft_ids(checkpoint: Checkpoint, fields: Fields, ranked: int, vocab: int) -> Tensor | None:
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
