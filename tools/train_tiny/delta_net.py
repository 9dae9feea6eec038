"""The gated delta rule over whole texts, for training: chunkwise with matrix products and a carried state.

The equations are those of the engine's windows: with G the cumulated log-decay inside a chunk, A_ij = β_i
e^{G_i−G_j} (k_i·k_j) below the diagonal, U = (I + A)^{-1} β [V − e^{G} (K S)], and so on.
"""

import torch
from torch import Tensor

BLOCK = 8
"""Rows solved by substitution before blocks are joined."""


@torch.library.custom_op("specdec_train::unit_inverse", mutates_args=())
def unit_inverse(lower: Tensor) -> Tensor:
    """Return (I + L)^{-1} of strictly lower triangular L [..., n, n], n being 8 times a power of 2.

    Blocks of 8 are inverted by substitution over all matrices at once, then joined in pairs: [[A, 0], [B, D]]
    has the inverse [[A', 0], [−D' B A', D']]. A custom operator, so that compilers keep it whole.
    """
    n = lower.shape[-1]
    flat = lower.reshape(-1, n, n)
    size, many = BLOCK, n // BLOCK
    corner = torch.stack([flat[:, i : i + size, i : i + size] for i in range(0, n, size)], 1)
    corner = corner.permute(2, 3, 0, 1).reshape(size, size, -1).contiguous()
    inverse = torch.zeros_like(corner)
    for i in range(size):
        inverse[i, i] = 1
        if i:
            inverse[i, :i] = -(corner[i, :i, None] * inverse[:i, :i]).sum(0)
    blocks = inverse.reshape(size, size, -1, many).permute(2, 3, 0, 1).contiguous()
    while size < n:
        first, second = blocks[:, 0::2], blocks[:, 1::2]
        below = torch.stack(
            [flat[:, i + size : i + 2 * size, i : i + size] for i in range(0, n, 2 * size)], 1
        )
        joined = blocks.new_zeros(len(flat), many // 2, 2 * size, 2 * size)
        joined[:, :, :size, :size], joined[:, :, size:, size:] = first, second
        joined[:, :, size:, :size] = -(second @ (below @ first))
        blocks, size, many = joined, 2 * size, many // 2
    return blocks.reshape(lower.shape).clone()


@unit_inverse.register_fake
def _(lower: Tensor) -> Tensor:
    return torch.empty_like(lower, memory_format=torch.contiguous_format)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _unit_inverse_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
    turned: Tensor = inverse.transpose(-1, -2)
    return -(turned @ grad @ turned)


unit_inverse.register_autograd(_unit_inverse_backward, setup_context=_keep)


def gated_delta_rule(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTW: Tensor,
    g_BHT: Tensor,
    beta_BHT: Tensor,
    *,
    chunk: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the outputs [B, H, T, W] from an empty state; q and k are normalised, T a multiple of `chunk`.

    Matrix products run in `dtype`; decays, the inverse and the state stay in float32.
    """
    B, H, T, K = k_BHTK.shape
    W, count = v_BHTW.shape[-1], T // chunk

    def cut(x: Tensor) -> Tensor:
        return x.reshape(B * H, count, chunk, -1)

    q, k, v, beta = cut(q_BHTK), cut(k_BHTK), cut(v_BHTW), cut(beta_BHT)
    total = g_BHT.reshape(B * H, count, chunk).cumsum(-1)
    seen = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~seen, float("-inf")).exp()
    q_, k_ = q.to(dtype), k.to(dtype)
    lower = ((k_ @ k_.mT).float() * decay * beta).tril(-1)
    solved = unit_inverse(lower).to(dtype)
    scores = ((q_ @ k_.mT).float() * decay).to(dtype)
    grown = total.exp().unsqueeze(-1)
    # Each token's update of an empty state, and the correction for the chunk's initial state.
    adds = (solved @ (v * beta).to(dtype)).unbind(1)
    takes = (solved @ (k * beta * grown).to(dtype)).unbind(1)
    reads = (q * grown).to(dtype).unbind(1)
    writes = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).to(dtype).unbind(1)
    whole = total[..., -1].exp()[..., None, None].unbind(1)
    state = torch.zeros(B * H, K, W, device=q.device)
    updates, inherited = [], []
    for i in range(count):
        narrow = state.to(dtype)
        update = adds[i] - takes[i] @ narrow
        updates.append(update)
        inherited.append(reads[i] @ narrow)
        state = state * whole[i] + (writes[i].mT @ update).float()
    out = torch.stack(inherited, 1) + scores @ torch.stack(updates, 1)
    return out.reshape(B, H, T, W)
