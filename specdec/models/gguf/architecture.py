"""One architecture as written by llama.cpp's converter: a table of names, fields and transforms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.models.gguf.metadata import Metadata

Transform = Callable[[Metadata, Tensor], Tensor]
BoundTransform = Callable[[Tensor], Tensor]

OUTER: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION: Mapping[str, str] = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def gated(file: str, checkpoint: str) -> dict[str, str]:
    """Return the names of a gated feed-forward's matrices; `{}` is replaced by gate, up and down."""
    return {file.format(part): checkpoint.format(part) for part in ("gate", "up", "down")}


NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
DENSE: Mapping[str, str] = {**ATTENTION, **NORMS, **gated("ffn_{}", "mlp.{}_proj")}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture become a checkpoint."""

    model_type: str
    names: Mapping[str, str]
    """Checkpoint names of a layer's tensors, by the file's names with or without the suffix; `{e}` is an
    expert's number."""
    config: Callable[[Metadata], dict[str, Any]]
    """Architecture-specific fields of config.json."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    """Transforms of tensors, by the suffix of the checkpoint name; the first match applies."""
    keeps: Callable[[Metadata, str], bool] = lambda metadata, name: True
    """True if a matrix may stay quantised: its transform must not split blocks."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    """Checkpoint names of the tensors outside layers."""
    head: Mapping[str, str] = field(default_factory=dict)
    """Full names of the multi-token head's tensors, unless they are named like one more layer's."""

    def transform(self, metadata: Metadata, checkpoint_name: str) -> BoundTransform | None:
        """Return the transform from the file's tensor to the checkpoint's, or None."""
        bare = checkpoint_name.removesuffix("_scale").removesuffix("_offset")
        found = next((own for end, own in self.transforms.items() if bare.endswith(end)), None)
        return partial(found, metadata) if found else None


def named(names: Mapping[str, str], stem: str, suffix: str) -> str | None:
    """Translate a name given as stem and suffix; a translation of the whole takes precedence."""
    if whole := names.get(stem + suffix):
        return whole
    return names[stem] + suffix if stem in names else None


def as_stored(metadata: Metadata, tensor_X: Tensor) -> Tensor:
    """Return the tensor unchanged."""
    return tensor_X


def subtract_one(metadata: Metadata, tensor_X: Tensor) -> Tensor:
    """Subtract the 1 that the converter adds to a norm's weight."""
    return tensor_X - 1


def log_decay(metadata: Metadata, tensor_X: Tensor) -> Tensor:
    """Return A_log, given A = -exp(A_log)."""
    return torch.log(-tensor_X)


def flatten(metadata: Metadata, tensor_X: Tensor) -> Tensor:
    """Flatten to one dimension."""
    return tensor_X.reshape(-1)


def as_row(metadata: Metadata, tensor_D: Tensor) -> Tensor:
    """Return a vector as a matrix of one row."""
    return tensor_D.reshape(1, -1)


def as_depthwise(metadata: Metadata, tensor_CK: Tensor) -> Tensor:
    """Return a depthwise convolution's weight as [C, 1, K]."""
    return tensor_CK.unsqueeze(1)


def unpair(metadata: Metadata, tensor_NX: Tensor) -> Tensor:
    """Reorder the rows of rotated heads: the converter interleaves the two halves of a head."""
    half = metadata.head_dim // 2
    if half < 1 or len(tensor_NX) % (2 * half):
        return tensor_NX  # wrong shape, reported by the later comparison
    return tensor_NX.view(-1, half, 2, *tensor_NX.shape[1:]).transpose(1, 2).reshape(tensor_NX.shape)


UNPAIRED: Mapping[str, Transform] = {
    f"{part}_proj.{end}": unpair for part in "qk" for end in ("weight", "bias")
}
