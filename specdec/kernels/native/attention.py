"""Attention over a narrow window, reading the pages in place."""

from dataclasses import replace

import torch
from torch import Tensor

from specdec.kernels.attention import cpu as attention
from specdec.kernels.group import Group
from specdec.kernels.native.call import function, pointer, serves, strided
from specdec.kernels.native.pointwise import rms_norm, rotate, sigmoid
from specdec.kernels.self_attention.composed import ComposedAttention
from specdec.kernels.self_attention.layer import AttentionLayer, Rotation


def append(k_TJD: Tensor, v_TJD: Tensor | None, pages_NPXJD: Tensor, group: Group) -> None:
    """Write keys and values with contiguous heads into pages of the same dtype."""
    parts = (k_TJD,) if v_TJD is None else (k_TJD, v_TJD)
    if not serves(k_TJD) or pages_NPXJD.dtype != k_TJD.dtype or not all(map(_dense_heads, parts)):
        return attention.append(k_TJD, v_TJD, pages_NPXJD, group)
    k_at, k_by_token = strided(k_TJD, 2)
    v_at, v_by_token = (None, 0) if v_TJD is None else strided(v_TJD, 2)
    function("append", k_TJD.dtype)(
        k_at,
        v_at,
        group.rows,
        group.width,
        *k_TJD.shape[1:],
        k_by_token,
        v_by_token,
        *strided(pages_NPXJD, 1),
        pages_NPXJD.shape[2],
        pointer(group.table_BN),
        group.table_BN.shape[1],
        pointer(group.length_B),
    )


def move(pages_NPXJD: Tensor, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
    """Copy each row's keys and values to other positions; all are read before any is written."""
    if not pages_NPXJD.is_cpu:
        return attention.move(pages_NPXJD, table_BN, from_BP, to_BP)
    _, parts, block, heads, dim = pages_NPXJD.shape
    size, (at, *strides) = pages_NPXJD.element_size(), strided(pages_NPXJD, 1)
    table_BN, from_BP, to_BP = (ids_BX.contiguous() for ids_BX in (table_BN, from_BP, to_BP))
    function("move")(
        at,
        *(stride * size for stride in strides),
        parts,
        heads,
        block,
        dim * size,
        pointer(table_BN),
        table_BN.shape[1],
        len(from_BP),
        pointer(from_BP),
        pointer(to_BP),
        from_BP.shape[1],
    )


def gate_heads(x_THW: Tensor, gate_TH: Tensor) -> Tensor:
    """Multiply each head by sigmoid(gate), computed identically in every window."""
    return x_THW * sigmoid(gate_TH).unsqueeze(-1)


def attend(
    q_THD: Tensor,
    pages_NPXJD: Tensor,
    group: Group,
    scale: float,
    window: int | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Attend to FP8 pages in C, by converting a copy of each row's blocks to the queries' dtype.

    So a token's sums are as independent of its window as with pages of that dtype.
    """
    if not serves(q_THD):
        return attention.attend(q_THD, pages_NPXJD, group, scale, window, value_dim)
    (_, heads, dim), size = q_THD.shape, pages_NPXJD.shape[2]
    layer = AttentionLayer(
        *(heads, pages_NPXJD.shape[3], dim, scale),
        gated=False,
        q_norm_D=None,
        k_norm_D=None,
        eps=0.0,
        window=window,
        value_dim=value_dim,
    )
    out, window_M = [], torch.arange(group.width)
    for row, length in enumerate(group.length_B.tolist()):
        skipped = 0 if window is None else max(length + 1 - window, 0) // size
        block_N = group.table_BN[row, skipped : -(-(length + group.width) // size)]
        length -= skipped * size
        row_NPXJD = pages_NPXJD.index_select(0, block_N).to(q_THD.dtype)
        own = replace(
            group,
            rows=1,
            table_BN=torch.arange(len(block_N))[None],
            length_B=torch.tensor([length]),
            ancestors_BMM=None if group.ancestors_BMM is None else group.ancestors_BMM[row : row + 1],
        )
        # The kernel appends its inputs: pass the window's own keys and values after quantisation.
        position_M = length + window_M
        kv_MXJD = row_NPXJD[position_M // size, :, position_M % size]
        q_MN = q_THD[row * group.width : (row + 1) * group.width].flatten(1)
        projected_MN = torch.cat((q_MN, kv_MXJD.flatten(1)), dim=1)
        out.append(self_attention(projected_MN, layer, None, row_NPXJD, own))
    return torch.cat(out).view(*q_THD.shape[:2], -1)


COMPOSED = ComposedAttention(rms_norm, rotate, append, attend)


def self_attention(
    projected_TN: Tensor, layer: AttentionLayer, rotation: Rotation | None, pages: Tensor, group: Group
) -> Tensor:
    """Run an attention layer between its projections in one call.

    FP8 pages take several calls, because keys and values are quantised in between.
    """
    tokens = projected_TN.shape[0]
    if not serves(projected_TN) or pages.dtype != projected_TN.dtype:
        return COMPOSED.self_attention(projected_TN, layer, rotation, pages, group)
    heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
    value_dim, (at, by_block, by_part, *by_position_and_head) = layer.value_dim or dim, strided(pages, 1)
    out_TN = projected_TN.new_empty((tokens, heads * value_dim))
    cos_TR, sin_TR = rotation or (None, None)
    function("self_attention", projected_TN.dtype)(
        pointer(projected_TN),
        group.rows,
        group.width,
        heads,
        kv_heads,
        dim,
        value_dim,
        layer.gated,
        *map(pointer, (layer.q_norm_D, layer.k_norm_D)),
        layer.q_norm_D is not None and layer.q_norm_D.dtype == projected_TN.dtype,
        layer.eps,
        pointer(cos_TR),
        pointer(sin_TR),
        0 if cos_TR is None else cos_TR.shape[1],
        layer.wide_rotation,
        at,
        by_block,
        by_part if layer.value_dim is None else 0,
        *by_position_and_head,
        pages.shape[2],
        pointer(group.table_BN),
        group.table_BN.shape[1],
        pointer(group.length_B),
        pointer(group.ancestors_BMM),
        layer.scale,
        layer.window or 0,
        pointer(out_TN),
    )
    return out_TN


def _dense_heads(x_TJD: Tensor) -> bool:
    return x_TJD.stride()[1:] == (x_TJD.shape[2], 1)
