"""Mixtures of experts: each chosen expert's weight is read once for all tokens, in 4, 8 or 16 bits.

In a narrow window the first pair of a token and an expert multiplies the whole window for all pairs of that
expert: one row costs as much as 16, and no sorting is needed. Wider windows list each expert's pairs on the
device and multiply blocks of them. In both cases each pair has its own output row and a token sums its
outputs in the order of its experts, so results do not depend on the order of execution.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.ffn.triton import apply_gate
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.linear.fp8 import BLOCK, Fp8
from specdec.kernels.linear.matrix import Matrix, Stored
from specdec.kernels.linear.triton import depth, integer_warps, lay
from specdec.kernels.linear.triton_integers import Tiles, multiply_tiles

NARROW_WINDOW = 16
"""Tokens of one tile."""


Packed = Stored | Tiles


def pack_experts(weight_END: Matrix) -> Packed:
    """Pack the weights of all experts for the kernels."""
    return lay(weight_END)


def experts(
    x_TD: Tensor,
    up_EID: Packed,
    down_EDI: Packed,
    index_TA: Tensor,
    weight_TA: Tensor,
    *,
    gated: bool,
    limit: float = math.inf,
) -> Tensor:
    """Sum each token's experts, which must be distinct. P counts pairs of a token and an expert."""
    (tokens, top_k), (num_experts, hidden, width) = index_TA.shape, down_EDI.shape
    x_TD, index_TA = x_TD.contiguous(), index_TA.contiguous()
    plan = None if tokens <= NARROW_WINDOW else _plan(index_TA, num_experts)
    hidden_PI = torch.empty(tokens * top_k, width, dtype=x_TD.dtype, device=x_TD.device)
    out_PD = torch.empty(tokens * top_k, hidden, dtype=x_TD.dtype, device=x_TD.device)
    activation = "swiglu" if gated else "relu2"
    _apply(x_TD, up_EID, index_TA, plan, hidden_PI, share=top_k, activation=activation, limit=limit)
    _apply(hidden_PI, down_EDI, index_TA, plan, out_PD, share=1, activation="none")
    out_TD = torch.empty_like(x_TD)
    block = min(triton.next_power_of_2(hidden), 1024)
    _combine[(tokens, triton.cdiv(hidden, block))](
        out_PD, weight_TA.contiguous(), out_TD, SIZE=hidden, TOP_K=top_k, BLOCK=block
    )
    return out_TD


class ExpertBlocks(NamedTuple):
    """Blocks of pairs, each of one expert."""

    pair_ET: Tensor
    """Each expert's pairs, in order, padded to the number of tokens."""
    count_E: Tensor
    block_BF: Tensor
    """Each block's expert and index of its first pair among the expert's; (−1, 0) after the last."""
    height: int


def _plan(index_TA: Tensor, num_experts: int) -> ExpertBlocks:
    """List each expert's pairs and cut the lists into blocks; only the device knows their number."""
    tokens, pairs, device = len(index_TA), index_TA.numel(), index_TA.device
    height = _height(pairs, num_experts)
    blocks = min(pairs, pairs // height + num_experts)
    pair_ET = torch.empty(num_experts, tokens, dtype=torch.int32, device=device)
    count_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    block_BF = torch.empty(blocks, 2, dtype=torch.int32, device=device)
    _list[(num_experts,)](index_TA, pair_ET, count_E, tokens, pairs, BLOCK=1024)
    wide = triton.next_power_of_2(num_experts)
    _cut[(1,)](count_E, block_BF, num_experts, blocks, HEIGHT=height, BLOCK=wide)
    return ExpertBlocks(pair_ET, count_E, block_BF, height)


def _height(pairs: int, num_experts: int) -> int:
    """Return the pairs per block: about the average per expert."""
    return next((height for height in (16, 32, 64) if pairs <= height * num_experts), 128)


class MoeTiling(NamedTuple):
    rows: int
    """Output rows; a gated program computes the same rows of gate and up."""
    warps: int
    stages: int


def tiling(height: int, *, gated: bool) -> MoeTiling:
    """Choose a program's tile by its tokens."""
    if height <= 16 and not gated:
        return MoeTiling(128, 2, 3)
    if height <= 32:
        return MoeTiling(32 if gated else 64, 4, 4)
    return MoeTiling(64, 4 if height == 64 else 8, 3)


def integer_tiling(height: int, dtype: torch.dtype, *, gated: bool) -> MoeTiling:
    """Choose a program's tile for integers: up to 64 tokens all heights use the same instruction."""
    halves = 2 if gated else 1
    if height > 64:
        return MoeTiling(128 // halves, 8, 3)
    rows = 64 if height <= 32 and dtype.itemsize == 2 else 32
    return MoeTiling(rows // halves, integer_warps(height, dtype), 4)


def _apply(
    x_RD: Tensor,
    weight: Packed,
    index_TA: Tensor,
    plan: ExpertBlocks | None,
    out_PN: Tensor,
    *,
    share: int,
    activation: str,
    limit: float = math.inf,
) -> None:
    """Write each pair's row: its expert's weight times row (pair // share) of x, then the activation."""
    tokens, top_k = index_TA.shape
    rows, height = out_PN.shape[1], plan.height if plan else NARROW_WINDOW
    gated = activation == "swiglu"
    tile = (
        integer_tiling(height, x_RD.dtype, gated=gated)
        if isinstance(weight, Tiles)
        else tiling(height, gated=gated)
    )
    _experts[(triton.cdiv(rows, tile.rows), len(plan.block_BF) if plan else len(out_PN))](
        x_RD,
        *_arguments(weight),
        out_PN,
        index_TA,
        *((plan.pair_ET, plan.count_E, plan.block_BF) if plan else (None, None, None)),
        tokens,
        N=rows,
        D=x_RD.shape[1],
        BITS=weight.bits if isinstance(weight, Tiles) else None,
        TOP_K=top_k,
        SHARE=share,
        ACTIVATION=activation,
        LIMIT=limit if limit < math.inf else None,
        BLOCK_A=triton.next_power_of_2(top_k),
        BLOCK_T=height,
        BLOCK_N=tile.rows,
        BLOCK_D=depth(x_RD.dtype),
        SIDE=BLOCK,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _arguments(weight: Packed) -> tuple[Tensor, Tensor | None]:
    """Return a weight's values and scales, None without scales."""
    if isinstance(weight, Tiles):
        return weight.number, weight.scale
    return (weight.weight_ND, weight.scale_MK) if isinstance(weight, Fp8) else (weight, None)


@kernel(do_not_specialize=["tokens", "pairs"])
def _list(index, pair_ET, count_E, tokens, pairs, BLOCK: tl.constexpr):
    overlap()
    expert = tl.program_id(0)
    pair_ET += expert.to(tl.int64) * tokens
    count = 0
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        hit = (tl.load(index + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(pair_ET + count + tl.cumsum(hit, 0) - 1, pair, mask=hit > 0)
        count += tl.sum(hit, 0)
    tl.store(count_E + expert, count)


@kernel(do_not_specialize=["blocks"])
def _cut(count_E, block_BF, experts, blocks, HEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    overlap()
    expert = tl.arange(0, BLOCK)
    count = tl.load(count_E + expert, mask=expert < experts, other=0)
    blocks_E = (count + HEIGHT - 1) // HEIGHT
    last = tl.cumsum(blocks_E, 0)
    for block in range(tl.max(blocks_E, 0)):
        at = block_BF + 2 * (last - blocks_E + block)
        tl.store(at, expert, mask=block < blocks_E)
        tl.store(at + 1, block * HEIGHT, mask=block < blocks_E)
    for first in range(tl.sum(blocks_E, 0), blocks, BLOCK):
        at = first + expert
        tl.store(block_BF + 2 * at, -1, mask=at < blocks)
        tl.store(block_BF + 2 * at + 1, 0, mask=at < blocks)


@triton.jit
def _multiply(
    x, in_T, weight, scale, expert, row, N: tl.constexpr, D: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Return tokens times an expert's rows, and for gated experts times the up half's rows."""
    at_N, at_D = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_N = row + at_N < N
    rows: tl.constexpr = 2 * N if ACTIVATION == "swiglu" else N
    steps: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    x = x[:, None]
    weight += (expert.to(tl.int64) * rows + row) * D + at_N[:, None] * D
    blocks: tl.constexpr = (D + SIDE - 1) // SIDE
    if scale is not None:
        scale += expert.to(tl.int64) * ((rows + SIDE - 1) // SIDE * blocks)
    sum_TN = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    up_TN = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for step in range(steps):
        column = step * BLOCK_D + at_D
        mask_TD, mask_ND = in_T[:, None], in_N[:, None]
        if D % BLOCK_D:
            mask_TD &= column[None, :] < D
            mask_ND &= column[None, :] < D
        b_x = tl.load(x + column[None, :], mask=mask_TD, other=0.0)
        b_weight = tl.load(weight + column[None, :], mask=mask_ND, other=0.0)
        if ACTIVATION == "swiglu":
            b_up = tl.load(weight + N * D + column[None, :], mask=mask_ND, other=0.0)
        if scale is None:
            sum_TN += tl.dot(b_x, tl.trans(b_weight), input_precision="tf32x3")
            if ACTIVATION == "swiglu":
                up_TN += tl.dot(b_x, tl.trans(b_up), input_precision="tf32x3")
        else:
            # Convert by way of float16 and float32, which run at full speed; direct conversion to bfloat16
            # does not.
            b_weight = b_weight.to(tl.float16).to(tl.float32).to(b_x.dtype)
            scale_at = scale + step * BLOCK_D // SIDE
            block_scale = tl.load(scale_at + row // SIDE * blocks)
            sum_TN += tl.dot(b_x, tl.trans(b_weight), input_precision="tf32x3") * block_scale
            if ACTIVATION == "swiglu":
                b_up = b_up.to(tl.float16).to(tl.float32).to(b_x.dtype)
                if N % BLOCK_N:
                    scale_N = tl.load(scale_at + (N + row + at_N) // SIDE * blocks, mask=in_N, other=0.0)
                    up_TN += tl.dot(b_x, tl.trans(b_up), input_precision="tf32x3") * scale_N[None, :]
                else:
                    block_scale = tl.load(scale_at + (N + row) // SIDE * blocks)
                    up_TN += tl.dot(b_x, tl.trans(b_up), input_precision="tf32x3") * block_scale
    return sum_TN, up_TN


@triton.jit
def _multiply_integers(
    x, in_T, number, scale, expert, row, N: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Do `_multiply` for integers, with both halves' rows in one product."""
    HALVES: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    at_N = tl.arange(0, HALVES * BLOCK_N)
    row_N = row + at_N % BLOCK_N
    sum_NT = multiply_tiles(
        x[None, :], in_T, number, scale, expert, row_N + at_N // BLOCK_N * N, row_N < N, 0,
        HALVES * N, D, BITS, 1, BLOCK_T, HALVES * BLOCK_N,
    )  # fmt: skip
    if HALVES == 1:
        up_NT = sum_NT
    else:
        sum_NT, up_NT = tl.split(tl.permute(tl.reshape(sum_NT, (2, BLOCK_N, BLOCK_T)), (1, 2, 0)))
    return tl.trans(sum_NT), tl.trans(up_NT)


@kernel(do_not_specialize=["tokens"])
def _experts(
    x, weight, scale, out, index, pair_ET, count_E, block_BF, tokens,
    N: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, TOP_K: tl.constexpr, SHARE: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    overlap()
    at_T = tl.arange(0, BLOCK_T)
    if block_BF is None:
        at_A = tl.arange(0, BLOCK_A)
        pair = tl.program_id(1)
        expert = tl.load(index + pair)
        pair_TA = at_T[:, None] * TOP_K + at_A[None, :]
        mask_TA = (at_T[:, None] < tokens) & (at_A[None, :] < TOP_K)
        hit_TA = tl.load(index + pair_TA, mask=mask_TA, other=-1) == expert
        if tl.sum(tl.sum((hit_TA & (pair_TA < pair)).to(tl.int32), 1), 0) > 0:
            return  # an earlier pair's program writes this one's row
        pair_T = tl.max(tl.where(hit_TA, pair_TA, -1), 1)
        in_T = pair_T >= 0
    else:
        expert = tl.load(block_BF + 2 * tl.program_id(1))
        if expert < 0:
            return
        index_T = tl.load(block_BF + 2 * tl.program_id(1) + 1) + at_T
        in_T = index_T < tl.load(count_E + expert)
        pair_T = tl.load(pair_ET + expert.to(tl.int64) * tokens + index_T, mask=in_T, other=0)
    row = tl.program_id(0) * BLOCK_N
    at_N = tl.arange(0, BLOCK_N)
    in_N = row + at_N < N
    pair_T = tl.where(in_T, pair_T, 0).to(tl.int64)
    x += pair_T // SHARE * D
    if BITS is None:
        sum_TN, up_TN = _multiply(
            x, in_T, weight, scale, expert, row, N, D, ACTIVATION, BLOCK_T, BLOCK_N, BLOCK_D, SIDE
        )
    else:
        sum_TN, up_TN = _multiply_integers(
            x, in_T, weight, scale, expert, row, N, D, BITS, ACTIVATION, BLOCK_T, BLOCK_N
        )
    kind = out.dtype.element_ty
    if ACTIVATION != "none":
        sum_TN = sum_TN.to(kind).to(tl.float32)
    if ACTIVATION == "swiglu":
        silu_TN = (sum_TN / (1.0 + tl.exp(-sum_TN))).to(kind).to(tl.float32)
        sum_TN = apply_gate(silu_TN, up_TN.to(kind).to(tl.float32), LIMIT)
    if ACTIVATION == "relu2":
        sum_TN = tl.where(sum_TN < 0, 0.0, sum_TN * sum_TN)
    out += pair_T[:, None] * N + row + at_N[None, :]
    tl.store(out, sum_TN.to(kind), mask=in_T[:, None] & in_N[None, :])


@kernel
def _combine(pair_out, weight, out, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    overlap()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    kind = pair_out.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for expert in range(TOP_K):
        pair = token * TOP_K + expert
        by = tl.load(weight + pair)
        value = tl.load(pair_out + pair * SIZE + at, mask=mask, other=0.0).to(tl.float32) * by.to(tl.float32)
        if weight.dtype.element_ty == kind:
            value = value.to(kind).to(tl.float32)
        total += value
    tl.store(out + token * SIZE + at, total.to(kind), mask=mask)
