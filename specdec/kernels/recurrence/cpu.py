"""The recurrence over a whole window at once: design.md 4.3, a forward substitution over the tree.

Letters beside the usual ones: Y counts key heads over rows, Z heads over rows. Inside, heads come first, so
that every product is one batched product.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.conv.cpu import fold_window
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.recurrence.states import States, Update
from specdec.kernels.rows import cast, locate_records, trim_path, write

CHUNK = 64
"""Tokens of a chain that are solved at once."""


class Tokens(NamedTuple):
    """A window's inputs, heads first, in the state's dtype."""

    q_YMK: Tensor
    k_YMK: Tensor
    v_ZMW: Tensor
    decay_ZM: Tensor
    beta_ZM1: Tensor | None

    def cut(self, start: int, end: int) -> "Tokens":
        q_YMK, k_YMK, v_ZMW, decay_ZM = (x[:, start:end] for x in self[:4])
        beta_ZM1 = None if self.beta_ZM1 is None else self.beta_ZM1[:, start:end]
        return Tokens(q_YMK, k_YMK, v_ZMW, decay_ZM, beta_ZM1)


class Solved(NamedTuple):
    """What a window leaves: outputs, what each node writes, and the decays along the paths."""

    o_ZMW: Tensor
    u_ZMW: Tensor
    decay_ZMM: Tensor
    """e^{G_i - G_j} where j is an ancestor of i or i itself, else 0."""
    log_ZM: Tensor
    """G."""


def recur(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THW: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor | None,
    memory: RecurrentMemory,
    group: Group,
) -> Tensor:
    """Read the state after each node with its query; G key heads serve H heads, `beta` None is Mamba-2.

    Mutates `memory`: the pending path is folded into the states; then the states move on over the tokens, if
    they are certain, or each token leaves a record, if it may be taken back.
    """
    assert group.record is not None or group.ancestors_BMM is None, "certain tokens form a chain"
    pending = None
    if group.path is not None and group.path_length_B is not None:
        pending = _accepted(memory, group.path, group.path_length_B)
    states = States(memory.state_SHKW, group.state_B, pending)
    dtype, out_dtype, rows = memory.state_SHKW.dtype, q_TGK.dtype, group.rows
    q_TGK, k_TGK, v_THW, decay_TH = (cast(x, dtype) for x in (q_TGK, k_TGK, v_THW, decay_TH))
    if beta_TH is not None:
        beta_TH = cast(beta_TH, dtype)
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
        # What is pending may be a view of the records: it is applied in here, before new ones are written.
        o_ZMW, u_ZMW, _, log_ZM = _solve(tokens, group.ancestors_BMM, states)
        at = locate_records(group.record)
        write(memory.key_SRGK, at, k_TGK)
        write(memory.update_SRHW, at, _packed(u_ZMW, rows))
        write(memory.decay_SRH, at, _packed(log_ZM, rows))
    states.store()
    return cast(_packed(o_ZMW, rows), out_dtype)


def fold(memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
    """Bring states and windows up to date with their paths, in place: what a row has committed."""
    fold_window(memory, slot_B, path, length_B)
    if memory.state_SHKW.shape[1]:
        States(memory.state_SHKW, slot_B, _accepted(memory, path, length_B)).store()


def _accepted(memory: RecurrentMemory, path: RecordIds, length_B: Tensor) -> Update | None:
    """Return what promoting the last record of each path makes of the state."""
    path, padding_BN = trim_path(path, length_B)
    rows, longest = path.slab_BN.shape
    if longest == 0:
        return None
    at, dtype = locate_records(path), memory.state_SHKW.dtype
    k_YNK = _heads_first(cast(memory.key_SRGK[at], dtype), rows)
    u_ZNW = _heads_first(cast(memory.update_SRHW[at], dtype), rows)
    log_ZN = _heads_first(memory.decay_SRH[at], rows)
    if padding_BN is None:
        end_Z1 = log_ZN[:, -1:]
        rest_ZN = end_Z1 - log_ZN
    else:
        heads = len(u_ZNW) // rows
        absent_ZN = padding_BN.repeat_interleave(heads, dim=0)
        length_Z1 = length_B.repeat_interleave(heads, dim=0)[:, None]
        k_YNK = k_YNK.masked_fill(padding_BN.repeat_interleave(len(k_YNK) // rows, dim=0)[..., None], 0)
        u_ZNW = u_ZNW.masked_fill(absent_ZN[..., None], 0)
        end_Z1 = log_ZN.gather(1, (length_Z1 - 1).clamp(min=0)).masked_fill(length_Z1 == 0, 0)
        rest_ZN = (end_Z1 - log_ZN).masked_fill(absent_ZN, 0)
    weighted_ZNW = u_ZNW * cast(rest_ZN.exp()[..., None], dtype)
    return Update(cast(end_Z1.exp()[..., None], dtype), _per_head(k_YNK, len(u_ZNW)).mT, weighted_ZNW)


def _step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHW: Tensor, decay_BH: Tensor, beta_BH: Tensor | None, states: States
) -> Tensor:
    """Advance by one certain token."""
    heads, (_, groups, size) = v_BHW.shape[1], k_BGK.shape
    if groups != heads:
        q_BGK = q_BGK.repeat_interleave(heads // groups, dim=1)
        k_BGK = k_BGK.repeat_interleave(heads // groups, dim=1)
    o_Z1W = states.step(
        decay_BH.exp().view(-1, 1, 1),
        q_BGK.reshape(-1, 1, size),
        k_BGK.reshape(-1, 1, size),
        v_BHW.reshape(-1, 1, v_BHW.shape[2]),
        None if beta_BH is None else beta_BH.reshape(-1, 1, 1),
    )
    return o_Z1W.view(v_BHW.shape)


def _extend(tokens: Tokens, states: States) -> Tensor:
    """Solve a certain chain and take the states to its end: in the fewest chunks, as equal as can be."""
    heads, width = tokens.v_ZMW.shape[:2]
    size = -(-width // -(-width // CHUNK))
    o = []
    for start in range(0, width, size):
        chunk = tokens.cut(start, start + size)
        solved = _solve(chunk, None, states)
        weighted_ZMW = solved.u_ZMW * solved.decay_ZMM[:, -1, :, None]
        scale_Z11 = solved.log_ZM[:, -1, None, None].exp()
        states.advance(Update(scale_Z11, _per_head(chunk.k_YMK, heads).mT, weighted_ZMW))
        o.append(solved.o_ZMW)
    return o[0] if len(o) == 1 else torch.cat(o, dim=1)


def _solve(tokens: Tokens, ancestors_BMM: Tensor | None, states: States) -> Solved:
    """Return what each node of a window reads and writes, from the committed state and its ancestors.

    (I + A) U = β [V − e^G K S],  A_ij = β_i e^{G_i − G_j} k_i·k_j for j above i;
    O = e^G Q S + P U,  P_ij = e^{G_i − G_j} q_i·k_j for j above i or i itself.
    """
    q_YMK, k_YMK, u_ZMW, decay_ZM, beta_ZM1 = tokens
    heads, width = decay_ZM.shape
    log_ZM, decay_ZMM = _decays(decay_ZM, ancestors_BMM)
    # The delta rule reads with keys and queries (C = 2), Mamba-2 with queries alone.
    reader_YXK = q_YMK if beta_ZM1 is None else torch.cat([k_YMK, q_YMK], dim=1)
    inner = torch.bmm(reader_YXK, k_YMK.mT).view(len(k_YMK), 1, -1, width, width)
    weight_ZCMM = (inner * decay_ZMM.view(len(k_YMK), -1, 1, width, width)).flatten(0, 1)
    read_ZCMW = states.read(_per_head(reader_YXK, heads)).view(heads, -1, width, u_ZMW.shape[2])
    read_ZCMW *= log_ZM.exp()[:, None, :, None]
    if beta_ZM1 is not None:
        u_ZMW = (u_ZMW - read_ZCMW[:, 0]).mul_(beta_ZM1)
        if width > 1:
            below_ZMM = weight_ZCMM[:, 0] * beta_ZM1
            u_ZMW = torch.linalg.solve_triangular(below_ZMM, u_ZMW, upper=False, unitriangular=True)
    o_ZMW = torch.baddbmm(read_ZCMW[:, -1], weight_ZCMM[:, -1], u_ZMW)
    return Solved(o_ZMW, u_ZMW, decay_ZMM, log_ZM)


def _decays(decay_ZM: Tensor, ancestors_BMM: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return G, and the decay from each ancestor of a node to the node.

    What lies between two nodes is summed from its own tokens. The difference of two sums from the root is
    the same number, less the digits that a strong decay above both of them has cost.
    """
    heads, width = decay_ZM.shape
    if ancestors_BMM is None:
        between_ZMM = decay_ZM[..., None].expand(-1, -1, width).tril(-1).cumsum(1)
        return decay_ZM.cumsum(1), between_ZMM.exp_().tril_()
    above_BMM = ancestors_BMM.to(decay_ZM.dtype)
    above_ZMM = _per_head(above_BMM, heads)
    part_ZMM = decay_ZM[:, None] * above_ZMM
    between_ZMM = torch.bmm(part_ZMM, _per_head(above_BMM.tril(-1), heads))
    return part_ZMM.sum(-1), between_ZMM.exp_().mul_(above_ZMM)


def _heads_first(x_TH: Tensor, rows: int) -> Tensor:
    """Turn packed tokens [B * M, H, ...] into [B * H, M, ...]."""
    if rows == 1:
        return x_TH.transpose(0, 1)
    return x_TH.view(rows, -1, *x_TH.shape[1:]).transpose(1, 2).flatten(0, 1)


def _packed(x_ZM: Tensor, rows: int) -> Tensor:
    """Turn [B * H, M, ...] back into packed tokens."""
    if rows == 1:
        return x_ZM.transpose(0, 1)
    return x_ZM.reshape(rows, -1, *x_ZM.shape[1:]).transpose(1, 2).flatten(0, 1)


def _per_head(x_Y: Tensor, heads: int) -> Tensor:
    """Repeat each of Y entries for the heads that it serves."""
    return x_Y if len(x_Y) == heads else x_Y.repeat_interleave(heads // len(x_Y), dim=0)
