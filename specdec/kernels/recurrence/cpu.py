"""The recurrence over a whole window at once: forward substitution over the tree.

Letters beside the usual ones: Y counts key heads over rows, Z heads over rows. Internally heads are the
outermost dimension, so every product is one batched product.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.conv.cpu import fold_window
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.recurrence.decays import HeadDecays, KeyDecays, along_paths, of_path, per_head
from specdec.kernels.recurrence.states import States, Update
from specdec.kernels.rows import cast, find_parents, locate_records, trim_path, write

CHUNK, KEY_CHUNK = 64, 16
"""Tokens of a chain per solve; fewer if each pair of tokens has a vector of decays."""


class Tokens(NamedTuple):
    """A window's inputs, heads first, in the state's dtype."""

    q_YMK: Tensor
    k_YMK: Tensor
    v_ZMW: Tensor
    decay_ZM: Tensor
    """[Z, M], or [Z, M, K]."""
    beta_ZM1: Tensor | None

    def cut(self, start: int, end: int) -> "Tokens":
        q_YMK, k_YMK, v_ZMW, decay_ZM = (x[:, start:end] for x in self[:4])
        beta_ZM1 = None if self.beta_ZM1 is None else self.beta_ZM1[:, start:end]
        return Tokens(q_YMK, k_YMK, v_ZMW, decay_ZM, beta_ZM1)


class Solved(NamedTuple):
    """A window's outputs, each node's update, and the decays along the paths."""

    o_ZMW: Tensor
    u_ZMW: Tensor
    decays: HeadDecays | KeyDecays


def scan_window(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THW: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor | None,
    memory: RecurrentMemory,
    group: Group,
    k_path_BPGK: Tensor | None,
) -> Tensor:
    assert group.tentative or group.ancestors_BMM is None, "certain tokens form a chain"
    dtype, out_dtype, rows = memory.state_SHKW.dtype, q_TGK.dtype, group.rows
    q_TGK, k_TGK, v_THW, decay_TH = (cast(x, dtype) for x in (q_TGK, k_TGK, v_THW, decay_TH))
    if beta_TH is not None:
        beta_TH = cast(beta_TH, dtype)
    if group.snapshot_BM is not None:
        o_THW = _snapshots(q_TGK, k_TGK, v_THW, decay_TH, beta_TH, memory.state_SHKW, group)
        return cast(o_THW, out_dtype)
    pending = None
    if group.path is not None and group.path_length_B is not None:
        assert k_path_BPGK is not None
        pending = _accepted(memory, group.path, group.path_length_B, k_path_BPGK)
    states = States(memory.state_SHKW, group.state_B, pending)
    if group.record is None and group.width == 1:
        o_THW = _step(q_TGK, k_TGK, v_THW, decay_TH, beta_TH, states)
        states.store()
        return cast(o_THW, out_dtype)

    tokens = Tokens(
        _heads_first(q_TGK, rows),
        _heads_first(k_TGK, rows),
        _heads_first(v_THW, rows),
        _heads_first(decay_TH, rows),
        None if beta_TH is None else _heads_first(beta_TH[..., None], rows),
    )
    if group.record is None:
        o_ZMW = _extend(tokens, states)
    else:
        o_ZMW, u_ZMW, _ = _solve(tokens, group.ancestors_BMM, states)
        at = locate_records(group.record)
        write(memory.update_SRHW, at, _packed(u_ZMW, rows))
        write(memory.decay_SRH, at, decay_TH)
    states.store()
    return cast(_packed(o_ZMW, rows), out_dtype)


def fold(
    memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor, k_path_BPGK: Tensor | None
) -> None:
    fold_window(memory, slot_B, path, length_B)
    if k_path_BPGK is not None:
        States(memory.state_SHKW, slot_B, _accepted(memory, path, length_B, k_path_BPGK)).store()


def _accepted(
    memory: RecurrentMemory, path: RecordIds, length_B: Tensor, k_path_BPGK: Tensor
) -> Update | None:
    """Return the state update that commits each row's whole path."""
    path, padding_BN = trim_path(path, length_B)
    rows, longest = path.slab_BN.shape
    if longest == 0:
        return None
    at, dtype = locate_records(path), memory.state_SHKW.dtype
    k_YNK = _heads_first(cast(k_path_BPGK[:, :longest], dtype).flatten(0, 1), rows)
    u_ZNW = _heads_first(memory.update_SRHW[at], rows)
    decay_ZN = _heads_first(memory.decay_SRH[at], rows)
    if padding_BN is not None:
        absent_ZN = padding_BN.repeat_interleave(len(u_ZNW) // rows, dim=0)
        k_YNK = k_YNK.masked_fill(padding_BN.repeat_interleave(len(k_YNK) // rows, dim=0)[..., None], 0)
        u_ZNW = u_ZNW.masked_fill(absent_ZN[..., None], 0)
        decay_ZN = decay_ZN.masked_fill(absent_ZN.view(*absent_ZN.shape, *[1] * (decay_ZN.dim() - 2)), 0)
    return of_path(decay_ZN, per_head(k_YNK, len(u_ZNW)), u_ZNW)


def _step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHW: Tensor, decay_BH: Tensor, beta_BH: Tensor | None, states: States
) -> Tensor:
    heads, (_, groups, size) = v_BHW.shape[1], k_BGK.shape
    if groups != heads:
        q_BGK = q_BGK.repeat_interleave(heads // groups, dim=1)
        k_BGK = k_BGK.repeat_interleave(heads // groups, dim=1)
    o_Z1W = states.step(
        decay_BH.exp().reshape(len(q_BGK) * heads, -1, 1),
        q_BGK.reshape(-1, 1, size),
        k_BGK.reshape(-1, 1, size),
        v_BHW.reshape(-1, 1, v_BHW.shape[2]),
        None if beta_BH is None else beta_BH.reshape(-1, 1, 1),
    )
    return o_Z1W.view(v_BHW.shape)


def _snapshots(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THW: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor | None,
    state_SHKW: Tensor,
    group: Group,
) -> Tensor:
    """Compute every node's state from its parent's, in topological order, one node of all rows at a time."""
    assert group.snapshot_BM is not None
    source_BM, width = _sources(group.snapshot_BM, group), group.width
    out = []
    for i in range(width):
        q_BGK, k_BGK, v_BHW, decay_BH = (x[i::width] for x in (q_TGK, k_TGK, v_THW, decay_TH))
        beta_BH = None if beta_TH is None else beta_TH[i::width]
        states = States(state_SHKW, group.snapshot_BM[:, i], None, source_BM[:, i])
        out.append(_step(q_BGK, k_BGK, v_BHW, decay_BH, beta_BH, states))
        states.store()
    return torch.stack(out, dim=1).flatten(0, 1)


def _sources(snapshot_BM: Tensor, group: Group) -> Tensor:
    """Return each node's source state slot: the row's own, or its parent's snapshot."""
    if group.ancestors_BMM is None:
        return torch.cat([group.state_B[:, None], snapshot_BM[:, :-1]], dim=1)
    return torch.cat([group.state_B[:, None], snapshot_BM], dim=1).gather(
        1, find_parents(group.ancestors_BMM)
    )


def _extend(tokens: Tokens, states: States) -> Tensor:
    """Solve a certain chain and advance the states, in the fewest chunks of nearly equal size."""
    heads, width = tokens.v_ZMW.shape[:2]
    size = -(-width // -(-width // (CHUNK if tokens.decay_ZM.dim() == 2 else KEY_CHUNK)))
    o = []
    for start in range(0, width, size):
        chunk = tokens.cut(start, start + size)
        solved = _solve(chunk, None, states)
        states.advance(solved.decays.to_end(per_head(chunk.k_YMK, heads), solved.u_ZMW))
        o.append(solved.o_ZMW)
    return o[0] if len(o) == 1 else torch.cat(o, dim=1)


def _solve(tokens: Tokens, ancestors_BMM: Tensor | None, states: States) -> Solved:
    """Solve a window from the committed state: each node's output, update and decays.

    (I + A) U = β [V − e^G K S],  A_ij = β_i e^{G_i − G_j} k_i·k_j for j above i;
    O = e^G Q S + P U,  P_ij = e^{G_i − G_j} q_i·k_j for j above i or i itself.
    """
    q_YMK, k_YMK, u_ZMW, decay_ZM, beta_ZM1 = tokens
    decays = along_paths(decay_ZM, ancestors_BMM)
    # The delta rule multiplies the state by keys and queries (C = 2), Mamba-2 by queries alone.
    reader_YXK = q_YMK if beta_ZM1 is None else torch.cat([k_YMK, q_YMK], dim=1)
    weight_ZCMM = decays.weigh(reader_YXK, k_YMK)
    read_ZCMW = decays.read(states, reader_YXK)
    if beta_ZM1 is not None:
        u_ZMW = (u_ZMW - read_ZCMW[:, 0]).mul_(beta_ZM1)
        if decay_ZM.shape[1] > 1:
            below_ZMM = weight_ZCMM[:, 0] * beta_ZM1
            u_ZMW = torch.linalg.solve_triangular(below_ZMM, u_ZMW, upper=False, unitriangular=True)
    o_ZMW = torch.baddbmm(read_ZCMW[:, -1], weight_ZCMM[:, -1], u_ZMW)
    return Solved(o_ZMW, u_ZMW, decays)


def _heads_first(x_TH: Tensor, rows: int) -> Tensor:
    """Convert packed tokens [B * M, H, ...] to [B * H, M, ...]."""
    if rows == 1:
        return x_TH.transpose(0, 1)
    return x_TH.view(rows, -1, *x_TH.shape[1:]).transpose(1, 2).flatten(0, 1)


def _packed(x_ZM: Tensor, rows: int) -> Tensor:
    """Convert [B * H, M, ...] to packed tokens [B * M, H, ...]."""
    if rows == 1:
        return x_ZM.transpose(0, 1)
    return x_ZM.reshape(rows, -1, *x_ZM.shape[1:]).transpose(1, 2).flatten(0, 1)
