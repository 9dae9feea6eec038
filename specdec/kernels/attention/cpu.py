"""Paged attention through torch's flash kernel, row by row.

Each row's keys and values are gathered and cut to the valid positions. So there is no padding to the longest
row, a single token needs no mask, and a row's result does not depend on the other rows. Batching rows was
faster only for many rows of less than 64 tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.attention.quantise import quantise
from specdec.kernels.group import Group

NARROW = 32
"""Maximum window width for which a lone row is appended block by block."""
QUERIES = 256
"""Queries of a chain that share one mask and one range of keys."""
FOLD_BELOW = 64
"""Window width from which query heads are not folded: each head alone has enough work."""


def append(k_TJD: Tensor, v_TJD: Tensor | None, pages_NPXJD: Tensor, group: Group) -> None:
    parts = (k_TJD,) if v_TJD is None else (k_TJD, v_TJD)
    kv_PTJD = tuple(quantise(x_TJD, pages_NPXJD.dtype) for x_TJD in parts)
    block_size = pages_NPXJD.shape[2]
    if group.rows == 1 and group.width <= NARROW:
        _append_narrow(torch.stack(kv_PTJD), pages_NPXJD, group.table_BN[0], int(group.length_B))
        return
    window_M = torch.arange(group.width, device=k_TJD.device)
    position_BM = group.length_B[:, None] + window_M
    block_T = group.table_BN.gather(1, position_BM // block_size).flatten()
    offset_T = (position_BM % block_size).flatten()
    for part, x_TJD in enumerate(kv_PTJD):
        pages_NPXJD[block_T, part, offset_T] = x_TJD


def attend(
    q_THD: Tensor,
    pages_NPXJD: Tensor,
    group: Group,
    scale: float,
    window: int | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Pass whole keys as values if keys contain them: torch's kernel takes no narrower values."""
    width, block_size = group.width, pages_NPXJD.shape[2]
    out = []
    for row, length in enumerate(group.length_B.tolist()):
        first, end = 0 if window is None else max(length + 1 - window, 0), length + width
        block_N = group.table_BN[row, first // block_size : -(-end // block_size)]
        positions = range(first % block_size, first % block_size + end - first)
        parts = [_gather(x_NXJD, block_N, positions, q_THD.dtype) for x_NXJD in pages_NPXJD.unbind(1)]
        k_1JLD, v_1JLD = parts[0], parts[-1]
        q_MHD = q_THD[row * width : (row + 1) * width]
        if width == 1:
            out.append(_attend(q_MHD, k_1JLD, v_1JLD, None, scale))
        elif group.ancestors_BMM is None:
            out += _attend_chain(q_MHD, k_1JLD, v_1JLD, scale, window)
        else:
            mask_ML = F.pad(group.ancestors_BMM[row], (length - first, 0), value=True)
            if window is not None:
                # Count the tokens from each ancestor to the end of the path; keep the last `window`.
                mask_ML &= mask_ML.flip(1).cumsum(1).flip(1) <= window
            out.append(_attend(q_MHD, k_1JLD, v_1JLD, mask_ML, scale))
    out_THD = out[0] if len(out) == 1 else torch.cat(out)
    return out_THD if value_dim is None else out_THD[..., -value_dim:]


def gate_heads(x_THW: Tensor, gate_TH: Tensor) -> Tensor:
    return x_THW * torch.sigmoid(gate_TH).unsqueeze(-1)


def move(pages_NPXJD: Tensor, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
    size = pages_NPXJD.shape[2]
    kv_BPPJD = pages_NPXJD[table_BN.gather(1, from_BP // size), :, from_BP % size]
    pages_NPXJD[table_BN.gather(1, to_BP // size), :, to_BP % size] = kv_BPPJD


def _append_narrow(kv_PMJD: Tensor, pages_NPXJD: Tensor, table_N: Tensor, start: int) -> None:
    width, block_size = kv_PMJD.shape[1], pages_NPXJD.shape[2]
    first, end = start // block_size, start + width
    written = 0
    for block in table_N[first : -(-end // block_size)].tolist():
        offset = (start + written) % block_size
        count = min(block_size - offset, width - written)
        pages_NPXJD[block, :, offset : offset + count] = kv_PMJD[:, written : written + count]
        written += count


def _gather(pages_NXJD: Tensor, block_N: Tensor, positions: range, dtype: torch.dtype) -> Tensor:
    """Gather a row's blocks and return some of their tokens [1, J, L, D] in the queries' dtype.

    The copy is needed even if the blocks are adjacent: other layers' blocks lie between them in the arena, so
    no view has one stride over all tokens.
    """
    _, _, heads, dim = pages_NXJD.shape
    row_NXJD = pages_NXJD.index_select(0, block_N)
    if row_NXJD.dtype != dtype:
        row_NXJD = row_NXJD.to(dtype)
    # Equivalent to reshape, slice, transpose and unsqueeze at a quarter of their cost.
    strides = (row_NXJD.numel(), dim, heads * dim, 1)
    return row_NXJD.as_strided((1, heads, len(positions), dim), strides, positions.start * heads * dim)


def _attend_chain(
    q_MHD: Tensor, k_1JLD: Tensor, v_1JLD: Tensor, scale: float, window: int | None
) -> list[Tensor]:
    """Attend causally, `QUERIES` queries at a time, each part to the keys that any of its queries sees."""
    out, before = [], k_1JLD.shape[2] - len(q_MHD)
    for part_MHD in torch.split(q_MHD, QUERIES):
        first, seen = 0 if window is None else max(before + 1 - window, 0), before + len(part_MHD)
        hidden_ML = q_MHD.new_full((len(part_MHD), seen - first), -torch.inf)
        mask_ML = hidden_ML.triu(before - first + 1)
        if window is not None:
            mask_ML += hidden_ML.tril_(before - first - window)
        keys = slice(first, seen)
        out.append(_attend(part_MHD, k_1JLD[:, :, keys], v_1JLD[:, :, keys], mask_ML, scale))
        before = seen
    return out


def _attend(q_MHD: Tensor, k_1JLD: Tensor, v_1JLD: Tensor, mask_ML: Tensor | None, scale: float) -> Tensor:
    """Attend from every query to every key that the boolean or additive mask allows."""
    width, heads, dim = q_MHD.shape
    kv_heads = k_1JLD.shape[1]
    if not _fold_pays(width, heads // kv_heads, q_MHD.dtype):
        q_1HMD = q_MHD.transpose(0, 1).unsqueeze(0)
        o_1HMD = F.scaled_dot_product_attention(
            q_1HMD, k_1JLD, v_1JLD, attn_mask=mask_ML, scale=scale, enable_gqa=heads != kv_heads
        )
        return o_1HMD.transpose(1, 2).reshape(width, heads, dim)

    # Fold the query heads that share a key head into its queries [J, M * G].
    q_MJGD = q_MHD.view(width, kv_heads, -1, dim)
    q_1JQD = q_MJGD.transpose(0, 1).reshape(1, kv_heads, -1, dim)
    if mask_ML is not None:
        mask_ML = mask_ML.unsqueeze(1).expand(-1, heads // kv_heads, -1).flatten(0, 1)
    o_1JQD = F.scaled_dot_product_attention(q_1JQD, k_1JLD, v_1JLD, attn_mask=mask_ML, scale=scale)
    return o_1JQD.view(kv_heads, width, -1, dim).transpose(0, 1).reshape(width, heads, dim)


def _fold_pays(width: int, sharing: int, dtype: torch.dtype) -> bool:
    """Return whether reading keys once for all query heads that share them measured faster."""
    if width >= FOLD_BELOW:
        return False
    return sharing > 2 or (sharing == 2 and width == 1 and dtype != torch.bfloat16)
