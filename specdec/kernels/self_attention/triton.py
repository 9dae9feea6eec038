"""An attention layer on a GPU: one kernel prepares queries, keys and values, and one or two attend."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.attention.triton import attend_gated
from specdec.kernels.group import Group
from specdec.kernels.kv_cache.triton import locate, page_strides, quantise
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.self_attention.layer import AttentionLayer, Rotation
from specdec.kernels.strides import dense, outer_strides


def self_attention(
    projected_TN: Tensor, layer: AttentionLayer, rotation: Rotation | None, pages: Tensor, group: Group
) -> Tensor:
    """Run everything between the projections; mutates `pages` as the append does."""
    tokens = projected_TN.shape[0]
    q_THD = ready(projected_TN, layer, rotation, pages, group)
    gate_THD = gate_of(projected_TN, layer)
    o_THW = attend_gated(q_THD, gate_THD, pages, group, layer.scale, layer.window, layer.value_dim)
    return o_THW.view(tokens, -1)


def gate_of(projected_TN: Tensor, layer: AttentionLayer) -> Tensor | None:
    """Return a view of the gates in the projection, or None; each gate follows its head's query."""
    if not layer.gated:
        return None
    queries_TN = projected_TN[:, : layer.widths[0]]
    return queries_TN.view(len(queries_TN), layer.heads, -1)[..., layer.head_dim :]


def ready(
    projected_TN: Tensor, layer: AttentionLayer, rotation: Rotation | None, pages: Tensor, group: Group
) -> Tensor:
    """Return normalised, rotated queries; append the keys, processed alike, and values to the pages."""
    tokens, width = projected_TN.shape
    assert width == sum(layer.widths)
    assert (layer.q_norm_D is None) == (layer.k_norm_D is None)
    heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
    cos_TR, sin_TR = map(dense, rotation) if rotation else (None, None)
    q_THD = torch.empty(tokens, heads, dim, dtype=projected_TN.dtype, device=projected_TN.device)
    norm = layer.q_norm_D
    _ready[(tokens, heads + pages.shape[1] * kv_heads)](
        *(dense(projected_TN), layer.q_norm_D, layer.k_norm_D, cos_TR, sin_TR, q_THD, pages),
        *(group.table_BN, dense(group.length_B), group.width, *outer_strides(group.table_BN, 1)),
        **page_strides(pages),
        eps=layer.eps,
        **{"H": heads, "J": kv_heads, "D": dim, "R": 0 if cos_TR is None else cos_TR.shape[1]},
        GATED=layer.gated,
        WIDE=layer.wide_rotation,
        OWN=norm is not None and norm.dtype == projected_TN.dtype and norm.itemsize < 4,
        PARTS=pages.shape[1],
        PAGE=pages.shape[2],
        BLOCK=triton.next_power_of_2(dim),
        num_warps=1,
    )
    return q_THD


@kernel(do_not_specialize=["width", "tables", "block_stride"], do_not_specialize_on_alignment=["length"])
def _ready(
    projected, q_weight, k_weight, cos, sin, q, pages, table, length, width, tables, block_stride, eps,
    BY_PART: tl.constexpr, BY_POSITION: tl.constexpr, BY_HEAD: tl.constexpr,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr,
    WIDE: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    token, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = q.dtype.element_ty
    head_stride: tl.constexpr = 2 * D if GATED else D
    at = tl.arange(0, BLOCK)
    mask = at < D
    start = tl.where(unit < H, unit * head_stride, H * head_stride + (unit - H) * D)
    projected += token * (H * head_stride + PARTS * J * D) + start
    value = tl.load(projected + at, mask=mask, other=0.0).to(tl.float32)
    if unit < H + J:
        # Rotate entry i against entry i + R; other entries pair with themselves and stay unchanged.
        pair = tl.where(at < R, at + R, tl.where(at < 2 * R, at - R, at))
        other = tl.load(projected + pair, mask=mask, other=0.0).to(tl.float32)
        if q_weight is not None:
            weight = q_weight if unit < H else k_weight
            scale = 1.0 / tl.sqrt(tl.sum(value * value) / D + eps)
            value = _weigh(value * scale, weight + at, mask, OWN, kind)
            other = _weigh(other * scale, weight + pair, mask, OWN, kind)
        if R > 0:
            is_rotated = at < 2 * R
            angle = token * R + at % R
            # Round every product, or none.
            part = tl.float32 if WIDE else kind
            c = tl.load(cos + angle, mask=is_rotated, other=1.0).to(part).to(tl.float32)
            s = tl.load(sin + angle, mask=is_rotated, other=0.0).to(part).to(tl.float32)
            s = tl.where(at < R, -s, s)
            rotated, cross = (value * c).to(part).to(tl.float32), (other * s).to(part).to(tl.float32)
            value = tl.where(is_rotated, (rotated + cross).to(kind).to(tl.float32), value)
    if unit < H:
        tl.store(q + (token * H + unit) * D + at, value.to(kind), mask=mask)
    else:
        offset = locate(table, length, token // width, token % width, tables, block_stride, BY_POSITION, PAGE)
        offset += tl.where(unit < H + J, (unit - H) * BY_HEAD, BY_PART + (unit - H - J) * BY_HEAD)
        tl.store(pages + offset + at, quantise(value, pages.dtype.element_ty), mask=mask)


@triton.jit
def _weigh(value, weight, mask, OWN: tl.constexpr, kind: tl.constexpr):
    """Multiply by a norm's weight and round; a weight in the heads' dtype also rounds before."""
    if OWN:
        value = value.to(kind).to(tl.float32)
    return (value * tl.load(weight, mask=mask, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
