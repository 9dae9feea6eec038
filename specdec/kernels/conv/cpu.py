"""The causal convolution for whole windows: shifted sums, oneDNN for long chains, gathers for trees."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.rows import cast, locate_records, locate_slots, trim_path, write

LONG = 32
"""Window width from which a depthwise convolution over channels-last memory beats one pass per tap."""
TILE = 1 << 19
"""Entries of a long chain per convolution call, so that intermediates stay in the cache."""


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    memory: RecurrentMemory,
    group: Group,
    *,
    silu: bool = True,
) -> Tensor:
    """Convolve as the reference does; a float32 weight stored [K, C] needs no conversion."""
    rows, width = group.rows, group.width
    slots = locate_slots(group.state_B)
    window_BIC = memory.window_SIC[slots]
    if group.path is not None and group.path_length_B is not None:
        window_BIC = _advance(window_BIC, memory.input_SRC, group.path, group.path_length_B)
        if group.record is not None:
            write(memory.window_SIC, slots, window_BIC)
    known_BNC = torch.cat([window_BIC, x_TC.view(rows, width, -1)], dim=1)
    if group.record is not None:
        write(memory.input_SRC, locate_records(group.record), x_TC)
    elif group.snapshot_BM is not None:
        write(memory.window_SIC, group.snapshot_BM.flatten(), _windows(known_BNC, group))
    else:
        write(memory.window_SIC, slots, known_BNC[:, width:])

    weight_KC = _taps_first(weight_CK, x_TC.dtype)
    if group.tap_BMC is not None:
        sum_BMC = _tree(cast(known_BNC, weight_KC.dtype), weight_KC, group.tap_BMC)
        return _finish(sum_BMC, bias_C, x_TC.dtype, silu=silu).view(x_TC.shape)
    # Tentative tokens' keys are recomputed by `path_conv` and must match bit for bit.
    convolve = _shifted if group.tentative else _chain
    tile, before = max(LONG, TILE // (rows * x_TC.shape[1])), len(weight_KC) - 1
    y_BMC = [
        _finish(convolve(known_BNC[:, i : i + tile + before], weight_KC), bias_C, x_TC.dtype, silu=silu)
        for i in range(0, width, tile)
    ]
    return (y_BMC[0] if len(y_BMC) == 1 else torch.cat(y_BMC, dim=1)).view(x_TC.shape)


def path_conv(
    weight_CK: Tensor,
    bias_C: Tensor | None,
    channels: slice,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
) -> Tensor:
    rows, longest = path.slab_BN.shape
    weight_KC = _taps_first(weight_CK[channels], memory.input_SRC.dtype)
    window_BIC = memory.window_SIC[..., channels][locate_slots(slot_B)]
    past_TC = memory.input_SRC[..., channels][locate_records(path)]
    known_BNC = torch.cat([window_BIC, past_TC.view(rows, longest, past_TC.shape[1])], dim=1)
    y_BPC = _shifted(known_BNC, weight_KC)
    return _finish(y_BPC, None if bias_C is None else bias_C[channels], past_TC.dtype, silu=True)


def fold_window(memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
    slots = locate_slots(slot_B)
    write(memory.window_SIC, slots, _advance(memory.window_SIC[slots], memory.input_SRC, path, length_B))


def _advance(window_BIC: Tensor, input_SRC: Tensor, path: RecordIds, length_B: Tensor) -> Tensor:
    """Return the windows after the recorded inputs: the last I of window and path."""
    path, padding_BN = trim_path(path, length_B)
    past_BNC = input_SRC[locate_records(path)].view(len(window_BIC), -1, window_BIC.shape[2])
    known_BNC = torch.cat([window_BIC, past_BNC], dim=1)
    if padding_BN is None:
        return known_BNC[:, path.slab_BN.shape[1] :]
    rows, inputs = window_BIC.shape[:2]
    last_BI = length_B[:, None] + torch.arange(inputs, device=length_B.device)
    return known_BNC[torch.arange(rows, device=length_B.device)[:, None], last_BI]


def _taps_first(weight_CK: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(weight_CK, torch.float64 if dtype == torch.float64 else torch.float32).t()


def _windows(known_BNC: Tensor, group: Group) -> Tensor:
    """Return the window after each node [B * M, I, C]: its taps' inputs except the oldest."""
    rows, known, _ = known_BNC.shape
    inputs = known - group.width
    if group.tap_BMC is None:
        first_M = torch.arange(1, group.width + 1, device=known_BNC.device)
        after_BMI = (first_M[:, None] + torch.arange(inputs, device=known_BNC.device))[None]
    else:
        after_BMI = group.tap_BMC[..., 1:]
    row_B11 = torch.arange(0, rows * known, known, device=known_BNC.device)[:, None, None]
    return known_BNC.flatten(0, 1)[(after_BMI + row_B11).flatten(0, 1)]


def _chain(known_BNC: Tensor, weight_KC: Tensor) -> Tensor:
    """Convolve along time; `known` begins with the K-1 inputs before the first output."""
    known_BNC = cast(known_BNC, weight_KC.dtype)
    taps, channels = weight_KC.shape
    width = known_BNC.shape[1] - taps + 1
    if width == 1:
        return (known_BNC * weight_KC).sum(1, keepdim=True)
    if width >= LONG and known_BNC.dtype == torch.float32:
        # Channels-last images of one column: oneDNN reads the packed layout without a copy.
        image_BCN1 = known_BNC[:, :, None].permute(0, 3, 1, 2)
        return F.conv2d(image_BCN1, weight_KC.t()[:, None, :, None], groups=channels)[..., 0].mT.contiguous()
    return _shifted(known_BNC, weight_KC)


def _shifted(known_BNC: Tensor, weight_KC: Tensor) -> Tensor:
    """Convolve along time, one pass per tap."""
    known_BNC, taps = cast(known_BNC, weight_KC.dtype), len(weight_KC)
    width = known_BNC.shape[1] - taps + 1
    y_BMC = known_BNC[:, :width] * weight_KC[0]
    for j in range(1, taps):
        y_BMC.addcmul_(known_BNC[:, j : j + width], weight_KC[j])
    return y_BMC


def _tree(known_BNC: Tensor, weight_KC: Tensor, tap_BMK: Tensor) -> Tensor:
    """Convolve along every node's path through the root into the inputs before the window."""
    rows, known, channels = known_BNC.shape
    row_B11 = torch.arange(0, rows * known, known, device=tap_BMK.device)[:, None, None]
    tap_KT = (tap_BMK + row_B11).flatten(0, 1).t().contiguous()
    known_NC = known_BNC.reshape(rows * known, channels)
    y_TC = known_NC.index_select(0, tap_KT[0]).mul_(weight_KC[0])
    for tap_T, weight_C in zip(tap_KT[1:], weight_KC[1:], strict=True):
        y_TC.addcmul_(known_NC.index_select(0, tap_T), weight_C)
    return y_TC.view(rows, -1, channels)


def _finish(y: Tensor, bias_C: Tensor | None, dtype: torch.dtype, *, silu: bool) -> Tensor:
    if bias_C is not None:
        y += bias_C
    y = cast(y, dtype)
    return F.silu(y, inplace=True) if silu else y
