"""The fold of a pending path, for kernels with a state block in registers, and as a kernel of its own."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.conv.triton import record_ids
from specdec.kernels.group import RecordIds, RecurrentMemory
from specdec.kernels.launch import kernel, overlap
from specdec.kernels.strides import dense, outer_strides

COLUMNS = 16


def fold_state(
    memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor, k_path_BPGK: Tensor
) -> None:
    """Advance each row's state over its records: S ← e^{g_j} S + k_j u_jᵀ."""
    state = memory.state_SHKW
    _, heads, size, columns = state.shape
    _fold_state[(triton.cdiv(columns, COLUMNS), heads, len(slot_B))](
        *(state, *outer_strides(state, 3), dense(slot_B)),
        **path_arguments(memory, path, length_B, k_path_BPGK),
        G=k_path_BPGK.shape[2],
        H=heads,
        K=size,
        W=columns,
        BK=triton.next_power_of_2(size),
        BW=COLUMNS,
        BY_KEY=memory.decay_SRH.dim() == 4,
        num_warps=1,
    )


def path_arguments(
    memory: RecurrentMemory, path: RecordIds | None, length_B: Tensor | None, k_path_BPGK: Tensor | None
) -> dict[str, Tensor | int | None]:
    """Return the records' updates and decays and the paths' ids, as kernel arguments."""
    update, decays = memory.update_SRHW, memory.decay_SRH
    update_by_slab, update_by_index = outer_strides(update, 2)
    decay_by_slab, decay_by_index = outer_strides(decays, decays.ndim - 2)
    path_slab, path_index = record_ids(path)
    return {
        "keys": None if path is None or k_path_BPGK is None else k_path_BPGK.contiguous(),
        "path_slab": path_slab,
        "path_index": path_index,
        "path_length": None if path is None else dense(length_B),
        "P": 0 if path is None else path.slab_BN.shape[1],
        "update": update,
        "update_by_slab": update_by_slab,
        "update_by_index": update_by_index,
        "decays": decays,
        "decay_by_slab": decay_by_slab,
        "decay_by_index": decay_by_index,
    }


@triton.jit
def inside(w, first, W: tl.constexpr, BW: tl.constexpr):
    """Return which columns of a block exist; a constant true if blocks divide the columns evenly."""
    if W % BW == 0:
        return w < BW
    return w < W - first


@triton.jit
def fold_path(
    s, keys, path_slab, path_index, length, update, update_by_slab, update_by_index, decays, decay_by_slab,
    decay_by_index, i, w, in_k, in_w, GK: tl.constexpr, BY_KEY: tl.constexpr, STRIDE: tl.constexpr = 4
):  # fmt: skip
    """Return a block of a state after its row's path; the loads of `STRIDE` records are issued together.

    Pointers to keys, ids, updates and decays are offset to the row, the head and the block.
    """
    for first in range(0, length, STRIDE):
        for offset in tl.static_range(STRIDE):
            n = first + offset
            on = n < length
            slab, index = tl.load(path_slab + n, mask=on, other=0), tl.load(path_index + n, mask=on, other=0)
            at = decays + slab * decay_by_slab + index * decay_by_index
            if BY_KEY:
                log_a = tl.load(at + i, mask=in_k & on, other=0.0)[:, None]
            else:
                log_a = tl.load(at, mask=on, other=0.0)
            k = tl.load(keys + n * GK + i, mask=in_k & on, other=0.0).to(tl.float32)
            u = tl.load(
                update + slab * update_by_slab + index * update_by_index + w, mask=in_w & on, other=0.0
            )
            s = s * tl.exp(log_a) + k[:, None] * u[None, :]
    return s


@kernel(do_not_specialize=["P"])
def _fold_state(
    state, state_by_slot, slots, keys, path_slab, path_index, path_length, P, update, update_by_slab,
    update_by_index, decays, decay_by_slab, decay_by_index, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    overlap()
    first, h, b = tl.program_id(0) * BW, tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, w = tl.arange(0, BK), tl.arange(0, BW)
    in_k, in_w = i < K, inside(w, first, W, BW)
    slot = tl.load(slots + b)
    length = tl.load(path_length + b)
    if slot != 0 and length > 0:
        at = state + slot * state_by_slot + h * K * W + first + i[:, None] * W + w[None, :]
        mask = in_k[:, None] & in_w[None, :]
        s = tl.load(at, mask=mask, other=0.0)
        s = fold_path(s, keys + (b * P * G + h // (H // G)) * K, path_slab + b * P, path_index + b * P,
                      length, update + h * W + first, update_by_slab, update_by_index,
                      decays + h * (K if BY_KEY else 1), decay_by_slab, decay_by_index, i, w, in_k, in_w,
                      G * K, BY_KEY)  # fmt: skip
        tl.store(at, s, mask=mask)
