"""Architectures with gated delta nets: Qwen3-Next and Qwen3.5, dense and with experts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.linear.integers import GROUP, HALF
from specdec.models.gguf.architecture import (
    DENSE,
    Architecture,
    Transform,
    as_depthwise,
    as_row,
    as_stored,
    gated,
    log_decay,
    subtract_one,
)
from specdec.models.gguf.dense import GATED_EXPERTS, dense_layers, experts
from specdec.models.gguf.metadata import FULL, LINEAR, Metadata

_NAMES: Mapping[str, str] = {
    **DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SPARSE: Mapping[str, str] = {
    **_NAMES,
    **GATED_EXPERTS,
    **gated("ffn_{}_shexp", "mlp.shared_expert.{}_proj"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_HEAD: Mapping[str, str] = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
"""The multi-token head except its layer, which is one more block after the model's."""
_TRANSFORMS: Mapping[str, Transform] = {
    "linear_attn.norm.weight": as_stored,
    "norm.weight": subtract_one,
    "norm_embedding.weight": subtract_one,
    "norm_hidden.weight": subtract_one,
    "A_log": log_decay,
    "conv1d.weight": as_depthwise,
    "shared_expert_gate.weight": as_row,
}


def _delta_net(metadata: Metadata) -> dict[str, Any]:
    every = metadata.integer("full_attention_interval", default=4)
    kinds = [LINEAR if (i + 1) % every else FULL for i in range(metadata.layers)]
    if metadata.field("attention.recurrent_layers") in metadata.fields:
        kinds = [LINEAR if own else FULL for own in metadata.listed("attention.recurrent_layers")]
    values = metadata.integer("ssm.time_step_rank")
    rotated = metadata.integer("rope.dimension_count", default=metadata.head_dim)
    return {
        "layer_types": kinds,
        "attention_bias": metadata.holds("attn_q.bias"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // values,
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "rope_parameters": {**metadata.rope(), "partial_rotary_factor": rotated / metadata.head_dim},
        "mtp_num_hidden_layers": int(metadata.block_holds(metadata.layers, "nextn.eh_proj")),
    }


def _with_experts(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length", default=0, least=0)
    own = {"norm_topk_prob": True, "shared_expert_intermediate_size": shared}
    return {
        **_delta_net(metadata),
        **experts(metadata),
        **own,
        "mlp_only_layers": dense_layers(metadata),
    }


_NARROW = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
_CHANNELS = ("in_proj_qkv.weight", "conv1d.weight")
_VALUES = ("in_proj_z.weight", "out_proj.weight")
"""Tensors of a delta net with one row per value head, per channel, or per entry of a value."""


def _in_order(part: str, metadata: Metadata, tensor_X: Tensor) -> Tensor:
    """Reorder tiled value heads (key heads vary fastest) to a checkpoint's grouped order.

    A tensor of unexpected shape is left unchanged, and reported by the shape check.
    """
    config, dim = _delta_net(metadata), int(part == "out_proj.weight")
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        metadata.refuse_value("ssm.time_step_rank", f"a multiple of ssm.group_count ({keys})")
    width = 1 if part in _NARROW else config["linear_value_head_dim"]
    first = 2 * keys * config["linear_key_head_dim"] if part in _CHANNELS else 0
    size = tensor_X.shape[dim] if tensor_X.dim() > dim else 0
    each = (first + values * width) // size if size else 0
    if values > keys and each in (1, HALF, GROUP) and each * size == first + values * width:
        order_N = torch.arange(values).view(-1, keys).T.reshape(-1, 1) * width + torch.arange(width)
        order_N = torch.cat([torch.arange(first), first + order_N.reshape(-1)])
        tensor_X = tensor_X.index_select(dim, order_N[::each] // each)  # a scale covers 16 or 32 columns
    transform = _TRANSFORMS.get(part)
    return transform(metadata, tensor_X) if transform else tensor_X


_TILED: Mapping[str, Transform] = {
    **{f"linear_attn.{part}": partial(_in_order, part) for part in (*_NARROW, *_CHANNELS, *_VALUES)},
    **_TRANSFORMS,
}
"""Transforms of Qwen3.5, whose value heads are tiled over key heads."""


def _cuts_none(metadata: Metadata, checkpoint_name: str) -> bool:
    """Return whether reordering columns by value heads moves whole blocks."""
    if not checkpoint_name.endswith("linear_attn.out_proj.weight"):
        return True
    width: int = _delta_net(metadata)["linear_value_head_dim"]
    return width % GROUP == 0


ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen35": Architecture("qwen3_5_text", _NAMES, _delta_net, _TILED, _cuts_none, head=_HEAD),
    "qwen35moe": Architecture("qwen3_5_moe_text", _SPARSE, _with_experts, _TILED, _cuts_none, head=_HEAD),
    "qwen3next": Architecture("qwen3_next", _SPARSE, _with_experts, _TRANSFORMS, head=_HEAD),
}
