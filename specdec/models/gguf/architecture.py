"""How llama.cpp's converter writes one model family: a table of names, fields and transforms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.models.gguf.metadata import Metadata

Recipe = Callable[[Tensor], Tensor]
Transform = Callable[[Metadata, Tensor], Tensor]

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


def gated(file: str, disk: str) -> dict[str, str]:
    """Return the names of a gated feed-forward's matrices; braces stand for gate, up and down."""
    return {file.format(part): disk.format(part) for part in ("gate", "up", "down")}


NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
DENSE: Mapping[str, str] = {**ATTENTION, **NORMS, **gated("ffn_{}", "mlp.{}_proj")}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture become a checkpoint."""

    model_type: str
    names: Mapping[str, str]
    """A checkpoint's names of a layer's tensors, by the file's names with or without the suffix; `{e}` stands
    for an expert's number."""
    config: Callable[[Metadata], dict[str, Any]]
    """Fields of config.json beside those that all have; None: the family does not read it."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    """Changes to tensors, by the end of a checkpoint's name; the first match counts."""
    keeps: Callable[[Metadata, str], bool] = lambda metadata, disk: True
    """Whether a matrix may be kept in blocks: what the transform does must not cut any."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    """What a checkpoint calls the tensors outside layers."""
    head: Mapping[str, str] = field(default_factory=dict)
    """Full names of the multi-token head's tensors, where they are not those of one more layer."""

    def recipe(self, metadata: Metadata, disk: str) -> Recipe | None:
        """Return what makes a checkpoint's tensor of the file's, if it is another one."""
        bare = disk.removesuffix("_scale").removesuffix("_offset")
        own = next((made for end, made in self.transforms.items() if bare.endswith(end)), None)
        return partial(own, metadata) if own else None


def named(names: Mapping[str, str], stem: str, suffix: str) -> str | None:
    """Translate a name, given in two parts; a translation of the whole counts first."""
    if whole := names.get(stem + suffix):
        return whole
    return names[stem] + suffix if stem in names else None


def as_stored(metadata: Metadata, own_X: Tensor) -> Tensor:
    """Return the tensor itself."""
    return own_X


def subtract_one(metadata: Metadata, own_X: Tensor) -> Tensor:
    """Subtract the one that the converter adds to a norm's weight."""
    return own_X - 1


def log_decay(metadata: Metadata, own_X: Tensor) -> Tensor:
    """Return A_log of A = -exp(A_log)."""
    return torch.log(-own_X)


def flatten(metadata: Metadata, own_X: Tensor) -> Tensor:
    """Return a tensor of one dimension."""
    return own_X.reshape(-1)


def as_row(metadata: Metadata, own_D: Tensor) -> Tensor:
    """Return a vector as a matrix of one row."""
    return own_D.reshape(1, -1)


def as_depthwise(metadata: Metadata, own_CK: Tensor) -> Tensor:
    """Return a depthwise convolution's weight as [C, 1, K]."""
    return own_CK.unsqueeze(1)


def unpair(metadata: Metadata, own_NX: Tensor) -> Tensor:
    """Reorder the rows of rotated heads: the converter puts the two of a pair side by side."""
    half = metadata.head_dim // 2
    if half < 1 or len(own_NX) % (2 * half):
        return own_NX  # of a wrong shape, which is reported where it is compared
    return own_NX.view(-1, half, 2, *own_NX.shape[1:]).transpose(1, 2).reshape(own_NX.shape)


UNPAIRED: Mapping[str, Transform] = {
    f"{part}_proj.{end}": unpair for part in "qk" for end in ("weight", "bias")
}
