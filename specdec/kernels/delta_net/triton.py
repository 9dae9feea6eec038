"""A gated delta net between its projections: one kernel for the inputs, the recurrence, then the norm."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.conv.triton import (
    SPAN,
    TOKENS,
    arena,
    convolve,
    finish,
    inputs_of,
    move_window,
    record_ids,
    store_inputs,
)
from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.gates.triton import softplus
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.norm.triton import gated_norm
from specdec.kernels.recurrence.triton import scan_window
from specdec.kernels.strides import dense, outer_strides


def delta_net(projected_TN: Tensor, layer: DeltaLayer, memory: RecurrentMemory, group: Group) -> Tensor:
    """Run everything between the projections; mutates `memory` as the convolution and the recurrence do."""
    key, _, value, _, heads, decays = layer.widths
    tokens, groups = len(projected_TN), layer.key_heads
    dtype, device = projected_TN.dtype, projected_TN.device
    q_TGK, k_TGK = torch.empty(2, tokens, groups, layer.key_dim, dtype=torch.float32, device=device)
    beta_TH = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    decay_TH = torch.empty(tokens, *layer.dt_bias_H.shape, dtype=torch.float32, device=device)
    v_THW = torch.empty(tokens, heads, layer.value_dim, dtype=dtype, device=device)
    k_path_BPGK = _empty_keys(layer, group.path, device) if group.path else None
    blocks = triton.cdiv(group.width, SPAN)
    _inputs[(2 * groups + heads, group.rows, blocks)](
        *(projected_TN, *outer_strides(projected_TN, 1), layer.conv_CK.t().contiguous()),
        *(layer.A_log_H, layer.dt_bias_H, layer.beta_scale),
        *(q_TGK, k_TGK, v_THW, decay_TH, beta_TH, k_path_BPGK),
        **arena(memory, group),
        M=group.width,
        **_sizes(layer),
        H=heads,
        W=layer.value_dim,
        MOVES=blocks == 1,
        BY_KEY=decays > heads,
        BOUND=layer.bound,
        SPAN=SPAN,
        BLOCK=triton.next_power_of_2(max(layer.key_dim, layer.value_dim)),
        num_warps=8 if decays > heads else 4,
    )
    if blocks > 1:
        store_inputs(projected_TN, memory, group)
    o_THW = scan_window(q_TGK, k_TGK, v_THW, decay_TH, beta_TH, memory, group, k_path_BPGK)
    z_TV = projected_TN[:, 2 * key + value : 2 * (key + value)]
    return gated_norm(
        *(o_THW.flatten(1), z_TV, layer.norm_W, layer.eps, layer.value_dim),
        gate_first=False,
        sigmoid=layer.sigmoid,
    )


def path_keys(
    layer: DeltaLayer, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor
) -> Tensor:
    """Recompute the keys of the pending paths from the inputs in their records."""
    k_path_BPGK = _empty_keys(layer, path, memory.input_SRC.device)
    _path_keys[(layer.key_heads, len(slot_B))](
        *(layer.conv_CK.t().contiguous(), k_path_BPGK, *inputs_of(memory, slot_B)),
        *(*record_ids(path), dense(length_B), path.slab_BN.shape[1]),
        **_sizes(layer),
        BLOCK=triton.next_power_of_2(layer.key_dim),
        num_warps=4,
    )
    return k_path_BPGK


def _sizes(layer: DeltaLayer) -> dict[str, int]:
    channels, taps = layer.conv_CK.shape
    return {"G": layer.key_heads, "K": layer.key_dim, "C": channels, "TAPS": taps, "BM": TOKENS}


def _empty_keys(layer: DeltaLayer, path: RecordIds, device: torch.device) -> Tensor:
    shape = (*path.slab_BN.shape, layer.key_heads, layer.key_dim)
    return torch.empty(shape, dtype=torch.float32, device=device)


@triton.jit
def _unit(total, kind: tl.constexpr):
    """Finish the convolution and scale its output vectors to length 1."""
    y = finish(total, kind).to(tl.float32)
    return y * (1.0 / tl.sqrt(tl.sum(y * y, 1) + 1e-6))[:, None]


@triton.jit
def _log_decay(step, rate, BOUND: tl.constexpr):
    """Return the log-decay, bounded below by `BOUND` if given."""
    other = tl.exp(tl.minimum(-rate * step, 80.0))
    return -rate * softplus(step) if BOUND is None else BOUND / (1.0 + other)


@triton.jit
def _store_path_keys(
    keys, g, window, record, by_slab, by_index, path_slab, path_index, length, weight, at, in_c,
    G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the keys of head g for the tokens of a row's path."""
    for first in range(0, length, BM):
        m = first + tl.arange(0, BM)
        total = convolve(m, m < length, 0, length, None, 0, None, window, 0, record, by_slab, by_index,
                         path_slab, path_index, None, None, weight, None, (G + g) * K + at, in_c, C, TAPS, BM,
                         BLOCK)  # fmt: skip
        to = keys + (m[:, None] * G + g) * K + at[None, :]
        tl.store(to, _unit(total, record.dtype.element_ty), mask=(m < length)[:, None] & in_c[None, :])


@kernel(do_not_specialize=["P"])
def _path_keys(
    weight, keys, window, window_by_slot, slots, record, by_slab, by_index, path_slab, path_index,
    path_length, P, G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    overlap()
    g, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    window += tl.load(slots + b) * window_by_slot
    _store_path_keys(keys + b * P * G * K, g, window, record, by_slab, by_index, path_slab + b * P,
                     path_index + b * P, tl.load(path_length + b), weight, at, at < K, G, K, C, TAPS, BM,
                     BLOCK)  # fmt: skip


@kernel(do_not_specialize=["P", "M"])
def _inputs(
    x, x_by_token, weight, A_log, dt_bias, beta_scale, q, k, v, decay, beta, keys, window, window_by_slot,
    slots, record, by_slab, by_index, path_slab, path_index, path_length, P, record_slab, record_index,
    snapshots, taps, M, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, TAPS: tl.constexpr, MOVES: tl.constexpr, BY_KEY: tl.constexpr, BOUND: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Convolve one head of queries, keys or values; normalise queries and keys, compute gates with values."""
    overlap()
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    if head < 2 * G:
        c, size = head * K + at, K
    else:
        c, size = 2 * G * K + (head - 2 * G) * W + at, W
    in_c = at < size
    slot, token = tl.load(slots + b), b * M
    row_window = window + slot * window_by_slot
    x += token * x_by_token
    length = b * 0
    if path_slab is not None:
        length = tl.load(path_length + b)
        path_slab += b * P
        path_index += b * P
        if head >= G and head < 2 * G and tl.program_id(2) == 0:
            _store_path_keys(keys + b * P * G * K, head - G, row_window, record, by_slab, by_index, path_slab,
                             path_index, length, weight, at, in_c, G, K, C, TAPS, BM, BLOCK)  # fmt: skip
    row_taps, row_snapshots = taps, snapshots
    if taps is not None:
        row_taps += token * TAPS
    if snapshots is not None:
        row_snapshots += token
    begin = tl.program_id(2) * SPAN
    for first in range(begin, min(begin + SPAN, M), BM):
        m = first + tl.arange(0, BM)
        in_m = m < M
        total = convolve(m, in_m, length, length, x, x_by_token, window, row_window, window_by_slot, record,
                         by_slab, by_index, path_slab, path_index, row_snapshots, row_taps, weight, None, c,
                         in_c & (slot != 0), C, TAPS, BM, BLOCK)  # fmt: skip
        mask = in_m[:, None] & in_c[None, :]
        kind: tl.constexpr = x.dtype.element_ty
        if head < G:
            to = q + ((token + m)[:, None] * G + head) * K + at[None, :]
            tl.store(to, _unit(total, kind) * (K**-0.5), mask=mask)
        elif head < 2 * G:
            to = k + ((token + m)[:, None] * G + head - G) * K + at[None, :]
            tl.store(to, _unit(total, kind), mask=mask)
        else:
            h = head - 2 * G
            tl.store(v + ((token + m)[:, None] * H + h) * W + at[None, :], finish(total, kind), mask=mask)
            gates = x + m.to(tl.int64) * x_by_token + C + H * W + h
            strength = tl.load(gates, mask=in_m, other=0.0).to(tl.float32)
            strength = (1.0 / (1.0 + tl.exp(-strength))).to(kind).to(tl.float32)
            tl.store(beta + (token + m) * H + h, strength * beta_scale, mask=in_m)
            rate = tl.exp(tl.load(A_log + h).to(tl.float32))
            if BY_KEY:
                keys_of = x + m.to(tl.int64)[:, None] * x_by_token + C + H * W + H + h * K + at[None, :]
                in_keys = in_m[:, None] & (at < K)[None, :]
                step = tl.load(keys_of, mask=in_keys, other=0.0).to(tl.float32)
                step += tl.load(dt_bias + h * K + at, mask=at < K, other=0.0)[None, :]
                to = decay + ((token + m)[:, None] * H + h) * K + at[None, :]
                tl.store(to, _log_decay(step, rate, BOUND), mask=in_keys)
            else:
                step = tl.load(gates + H, mask=in_m, other=0.0).to(tl.float32) + tl.load(dt_bias + h)
                tl.store(decay + (token + m) * H + h, _log_decay(step, rate, BOUND), mask=in_m)
    if MOVES:
        move_window(b, slot, x, x_by_token, window, window_by_slot, record, by_slab, by_index, path_slab,
                    path_index, length, record_slab, record_index, snapshots, M,
                    c, in_c, TAPS, BM)  # fmt: skip
