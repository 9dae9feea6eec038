"""Paged attention, one token at a time."""

import torch
from torch import Tensor

from specdec.kernels.attention.quantise import quantise
from specdec.kernels.group import Group


def append(k_TJD: Tensor, v_TJD: Tensor | None, pages_NPXJD: Tensor, group: Group) -> None:
    """Write the window's keys and values into the rows' blocks, after the committed tokens.

    Latent attention has no separate values (`v_TJD` is None); its pages then hold keys alone.
    """
    for part, x_TJD in enumerate((k_TJD,) if v_TJD is None else (k_TJD, v_TJD)):
        for row in range(group.rows):
            for node in range(group.width):
                block, offset = _locate(pages_NPXJD, group, row, int(group.length_B[row]) + node)
                x_JD = x_TJD[row * group.width + node]
                pages_NPXJD[block, part, offset] = quantise(x_JD, pages_NPXJD.dtype)


def attend(
    q_THD: Tensor,
    pages_NPXJD: Tensor,
    group: Group,
    scale: float,
    window: int | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Attend from each node to its row's committed tokens, its ancestors and itself, within `window` tokens.

    The window's own keys and values must have been appended. H query heads share J key heads in order. A
    value is the last `value_dim` entries of the page's last part; pages with a single part store values
    inside the keys.
    """
    out_THW = q_THD.new_empty(*q_THD.shape[:2], value_dim or q_THD.shape[2])
    for row in range(group.rows):
        length = int(group.length_B[row])
        for node in range(group.width):
            path = [*range(length), *(length + other for other in _visible(group, row, node))]
            seen = path if window is None else path[-window:]
            locations = [_locate(pages_NPXJD, group, row, position) for position in seen]
            kv_PLJD = torch.stack([pages_NPXJD[block, :, offset] for block, offset in locations], dim=1)
            token = row * group.width + node
            out_THW[token] = _attend_one(q_THD[token], kv_PLJD, scale, out_THW.shape[2])
    return out_THW


def gate_heads(x_THW: Tensor, gate_TH: Tensor) -> Tensor:
    """Return x · sigmoid(gate) with one gate per head; both are rounded to the dtype of x."""
    wide = torch.float64 if gate_TH.dtype == torch.float64 else torch.float32
    return x_THW * torch.sigmoid(gate_TH.to(wide)).to(x_THW.dtype)[..., None]


def move(pages_NPXJD: Tensor, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
    """Copy each row's keys and values to other positions, in place; all are read before any is written.

    The accepted path of a tree is scattered after the committed tokens and must directly follow them. Rows
    with fewer moves than others are padded with a position that moves onto itself, such as the root's.
    """
    size, before_NPXJD = pages_NPXJD.shape[2], pages_NPXJD.clone()
    for table_N, from_P, to_P in zip(table_BN.tolist(), from_BP.tolist(), to_BP.tolist(), strict=True):
        for source, target in zip(from_P, to_P, strict=True):
            kv_PJD = before_NPXJD[table_N[source // size], :, source % size]
            pages_NPXJD[table_N[target // size], :, target % size] = kv_PJD


def _attend_one(q_HD: Tensor, kv_PLJD: Tensor, scale: float, value_dim: int) -> Tensor:
    wide = torch.float64 if q_HD.dtype == torch.float64 else torch.float32
    kv_PLHD = kv_PLJD.to(wide).repeat_interleave(len(q_HD) // kv_PLJD.shape[2], dim=2)
    k_LHD, v_LHW = kv_PLHD[0], kv_PLHD[-1, ..., -value_dim:]
    score_HL = torch.einsum("hd,lhd->hl", q_HD.to(wide), k_LHD) * scale
    weight_HL = torch.exp(score_HL - score_HL.amax(-1, keepdim=True))
    # The weights are rounded before they multiply the values; the divisor is the sum of unrounded weights.
    sum_HW = torch.einsum("hl,lhw->hw", weight_HL.to(q_HD.dtype).to(wide), v_LHW)
    return (sum_HW / weight_HL.sum(-1, keepdim=True)).to(q_HD.dtype)


def _visible(group: Group, row: int, node: int) -> list[int]:
    if group.ancestors_BMM is None:
        return list(range(node + 1))
    return [other for other in range(group.width) if bool(group.ancestors_BMM[row, node, other])]


def _locate(pages_NPXJD: Tensor, group: Group, row: int, position: int) -> tuple[int, int]:
    """Return the block of a row's position, and the offset in it."""
    index, offset = divmod(position, pages_NPXJD.shape[2])
    return int(group.table_BN[row, index]), offset
