"""FlashInfer's XQA for decode and verify windows, reading our pages directly.

It reads tables, lengths and masks from the device and plans nothing on the host, so a CUDA graph can capture
it. nvcc compiles it on first use for each window width, which takes a minute or two, so warm up before
capturing. Prefill and everything else that `supports` rejects runs in Triton: prefill windows come in any
width, and FlashInfer's kernels for long chunks plan on the host.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.group import Group
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.self_attention.layer import AttentionLayer
from specdec.kernels.strides import dense, outer_strides

NODES = 64
"""Widest window that is passed to XQA."""
SHARING = 32
"""Most query heads per key head that XQA's tiles hold."""
SCRATCH, SEMAPHORES = 128 << 20, 1 << 18
"""Bytes for split rows' partial results, about 16 KiB per 32 queries and processor, and for counters."""


class Scratch(NamedTuple):
    """XQA's workspace. It resets the counters to zero; calls that may overlap need one each."""

    workspace: Tensor
    semaphores: Tensor

    @classmethod
    def on(cls, device: torch.device) -> "Scratch":
        workspace = torch.empty(SCRATCH, dtype=torch.uint8, device=device)
        semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device=device)
        return cls(workspace, semaphores.view(torch.uint32))


def supports(group: Group, layer: AttentionLayer, pages_NPXJD: Tensor) -> bool:
    """Return whether XQA supports a group's windows: single tokens and tentative windows up to `NODES` wide.

    Other windows, such as prefill, come in any width. XQA counts strides in whole heads and needs separate
    values. Sliding-window layers are excluded, because its result for a tree across the window's edge is
    untested.
    """
    _, _, page, heads, dim = pages_NPXJD.shape
    return (
        layer.window is None
        and layer.value_dim is None
        and pages_NPXJD.dtype in (torch.bfloat16, torch.float16)
        and page in (16, 32, 64, 128)
        and dim % 16 == 0
        and dim <= 256
        and layer.heads // heads <= SHARING
        and (group.width == 1 or (group.tentative and group.width <= NODES))
        and all(stride % dim == 0 for stride in outer_strides(pages_NPXJD, 1))
    )


def attend(q_THD: Tensor, pages_NPXJD: Tensor, group: Group, scale: float, scratch: Scratch) -> Tensor:
    from flashinfer.xqa import xqa

    _, heads, dim = q_THD.shape
    key_NXJD, value_NXJD = pages_NPXJD.unbind(1)
    table_BN, length_B, mask_BMW = pack(group)
    window = (group.rows, 1, heads, dim) if group.width == 1 else (group.rows, 1, group.width, heads, dim)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    xqa(
        *(q_THD.contiguous().view(window), key_NXJD, value_NXJD),
        *(table_BN, length_B[:, None], out_THD.view(window), *scratch),
        num_kv_heads=pages_NPXJD.shape[3],
        page_size=pages_NPXJD.shape[2],
        q_scale=scale * math.sqrt(dim),  # XQA itself divides by sqrt(D)
        q_seq_len=group.width,
        mask=None if group.width == 1 else mask_BMW.view(torch.uint16),
        # Its first inputs come from the preceding kernel, which does not signal completion.
        enable_pdl=False,
    )
    return out_THD


def pack(group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block table, lengths including the window, and ancestor masks as bits of 32-bit words."""
    words, columns = triton.cdiv(group.width, 32), group.table_BN.shape[1]
    device = group.table_BN.device
    table_BN = torch.empty(group.rows, columns, dtype=torch.int32, device=device)
    length_B = torch.empty(group.rows, dtype=torch.int32, device=device)
    mask_BMW = torch.empty(group.rows, group.width, words, dtype=torch.int32, device=device)
    seen_BMM = None if group.ancestors_BMM is None else dense(group.ancestors_BMM).view(torch.uint8)
    _pack[(group.rows,)](
        *(group.table_BN, dense(group.length_B), seen_BMM, table_BN, length_B, mask_BMW),
        *(group.width, columns, *outer_strides(group.table_BN, 1)),
        BLOCK=triton.next_power_of_2(group.width),
        WORDS=words,
    )
    return table_BN, length_B.view(torch.uint32), mask_BMW


@kernel(do_not_specialize=["width", "columns", "tables"], do_not_specialize_on_alignment=["length"])
def _pack(
    table, length, ancestors, table_out, length_out, mask_out, width, columns, tables,
    BLOCK: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    overlap()
    row = tl.program_id(0).to(tl.int64)
    for first in range(0, columns, 128):
        at = first + tl.arange(0, 128)
        block = tl.load(table + row * tables + at, mask=at < columns, other=0)
        tl.store(table_out + row * columns + at, block.to(tl.int32), mask=at < columns)
    tl.store(length_out + row, (tl.load(length + row) + width).to(tl.int32))
    node = tl.arange(0, BLOCK)
    for word in tl.static_range(WORDS):
        bit = tl.arange(0, 32)
        other = word * 32 + bit
        if ancestors is None:
            seen = (other[None, :] <= node[:, None]).to(tl.int64)
        else:
            seen_at = ancestors + (row * width + node[:, None]) * width + other[None, :]
            mask = (node < width)[:, None] & (other < width)[None, :]
            seen = tl.load(seen_at, mask=mask, other=0).to(tl.int64)
        bits = tl.sum(seen << bit[None, :].to(tl.int64), axis=1)
        tl.store(mask_out + (row * width + node) * WORDS + word, bits.to(tl.int32), mask=node < width)
