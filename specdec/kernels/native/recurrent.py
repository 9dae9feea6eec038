"""Convolution, recurrence, gated delta net and Mamba-2 over a narrow window."""

import torch
from torch import Tensor

from specdec.kernels.conv import cpu as conv
from specdec.kernels.delta_net.composed import ComposedDeltaNet
from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.gates import cpu as gates
from specdec.kernels.gates.cpu import delta_gates
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.mamba.composed import ComposedMamba
from specdec.kernels.native.call import TOKENS, function, has_room, ids, pointer, records_of, serves, strided
from specdec.kernels.native.compiled import MOST
from specdec.kernels.native.pointwise import gated_norm
from specdec.kernels.native.signatures import SUFFIX
from specdec.kernels.recurrence import cpu as recurrence
from specdec.kernels.strides import window_stride


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    memory: RecurrentMemory,
    group: Group,
    *,
    silu: bool = True,
) -> Tensor:
    """Convolve a narrow window with a float32 weight stored [K, C]."""
    weight_KC = weight_CK.t()
    fits = weight_KC.dtype == torch.float32 and weight_KC.is_contiguous() and x_TC.stride(1) == 1
    if not fits or not serves(x_TC):
        return conv.causal_conv(x_TC, weight_CK, bias_C, memory, group, silu=silu)
    bias_C = None if bias_C is None else bias_C.float()
    taps, channels = weight_KC.shape
    out_TC, (at, by_token) = torch.empty(x_TC.shape, dtype=x_TC.dtype), strided(x_TC, 1)
    function("causal_conv", x_TC.dtype)(
        at,
        group.rows,
        group.width,
        channels,
        taps,
        by_token,
        pointer(weight_KC),
        pointer(bias_C),
        silu,
        *_conv_memory(memory, group),
        pointer(out_TC),
    )
    return out_TC


def path_conv(
    weight_CK: Tensor,
    bias_C: Tensor | None,
    channels: slice,
    memory: RecurrentMemory,
    slot_B: Tensor,
    path: RecordIds,
    length_B: Tensor,
) -> Tensor:
    """Recompute the convolution of short paths as `causal_conv` did; see conv/cpu.py."""
    weight_KC, record = weight_CK.t(), memory.input_SRC
    fits = weight_KC.dtype == torch.float32 and weight_KC.is_contiguous()
    if not fits or record.dtype not in SUFFIX or not path.slab_BN.is_cpu or path.slab_BN.numel() > TOKENS:
        return conv.path_conv(weight_CK, bias_C, channels, memory, slot_B, path, length_B)
    bias_C = None if bias_C is None else bias_C.float()
    (taps, width), (rows, longest) = weight_KC.shape, path.slab_BN.shape
    first, end, _ = channels.indices(width)
    path = RecordIds(*(x.contiguous() for x in path))
    out_BPC = torch.empty((rows, longest, end - first), dtype=record.dtype)
    function("path_conv", record.dtype)(
        *(rows, width, taps, first, end - first),
        pointer(weight_KC),
        pointer(bias_C),
        *_inputs_of(memory, slot_B),
        *map(pointer, (*path, length_B)),
        longest,
        pointer(out_BPC),
    )
    return out_BPC


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
    """Run the recurrence over narrow windows of any number of rows, in float32."""
    state = memory.state_SHKW
    fits = state.dtype == q_TGK.dtype == v_THW.dtype == torch.float32 and state.is_cpu
    if not fits or group.width > TOKENS or not has_room(group):
        return recurrence.scan_window(q_TGK, k_TGK, v_THW, decay_TH, beta_TH, memory, group, k_path_BPGK)
    out_THW = torch.empty(v_THW.shape, dtype=torch.float32)
    q_TGK, k_TGK, v_THW, decay_TH = (x.contiguous() for x in (q_TGK, k_TGK, v_THW, decay_TH))
    beta_TH = None if beta_TH is None else beta_TH.contiguous()
    k_path_BPGK = None if k_path_BPGK is None else k_path_BPGK.float().contiguous()
    function("scan_window")(
        *map(pointer, (q_TGK, k_TGK, v_THW, decay_TH, beta_TH, out_THW)),
        *(group.rows, group.width, k_TGK.shape[1]),
        *_states_of(memory, group.state_B),
        pointer(k_path_BPGK),
        *ids(group),
        pointer(group.ancestors_BMM),
    )
    return out_THW


def fold(
    memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor, k_path_BPGK: Tensor | None
) -> None:
    """Fold paths into states and windows, in place, by running a window without tokens."""
    state, (rows, longest) = memory.state_SHKW, path.slab_BN.shape
    if k_path_BPGK is None or state.dtype != torch.float32 or not state.is_cpu or longest > MOST:
        return recurrence.fold(memory, slot_B, path, length_B, k_path_BPGK)
    conv.fold_window(memory, slot_B, path, length_B)
    k_path_BPGK = k_path_BPGK.float().contiguous()
    path, length_B = RecordIds(*(x.contiguous() for x in path)), length_B.contiguous()
    function("scan_window")(
        *[None] * 6,
        *(rows, 0, k_path_BPGK.shape[2]),
        *_states_of(memory, slot_B),
        pointer(k_path_BPGK),
        *map(pointer, (*path, length_B)),
        longest,
        *[None] * 4,
    )


def l2_normalise(x_TGK: Tensor, scale: float | Tensor) -> Tensor:
    """Scale each head to length `scale`, in float32."""
    dense = x_TGK.stride()[1:] == (x_TGK.shape[2], 1)
    if isinstance(scale, Tensor) or not serves(x_TGK) or not dense:
        return gates.l2_normalise(x_TGK, scale)
    out_TGK, (at, by_token) = torch.empty(x_TGK.shape, dtype=torch.float32), strided(x_TGK, 2)
    function("l2_normalise", x_TGK.dtype)(at, *x_TGK.shape, by_token, scale, pointer(out_TGK))
    return out_TGK


def mamba_step(dt_TH: Tensor, dt_bias_H: Tensor, limit: tuple[float, float]) -> Tensor:
    """Return Mamba-2's step size, in float32."""
    if not serves(dt_TH) or dt_bias_H.dtype != torch.float32 or dt_TH.stride(1) != 1:
        return gates.mamba_step(dt_TH, dt_bias_H, limit)
    step_TH, (at, by_token) = torch.empty(dt_TH.shape, dtype=torch.float32), strided(dt_TH, 1)
    low, high = (min(bound, torch.finfo(torch.float32).max) for bound in limit)
    function("mamba_step", dt_TH.dtype)(
        *(at, *dt_TH.shape, by_token, pointer(dt_bias_H), low, high), pointer(step_TH)
    )
    return step_TH


def delta_net(projected_TN: Tensor, layer: DeltaLayer, memory: RecurrentMemory, group: Group) -> Tensor:
    """Run a gated delta net between its projections, in one call for narrow steps."""
    fits = memory.state_SHKW.dtype == torch.float32 and has_room(group)
    if not serves(projected_TN) or not fits:
        return DELTA_NET.delta_net(projected_TN, layer, memory, group)
    tokens = projected_TN.shape[0]
    weight_KC = layer.conv_CK.t()
    assert weight_KC.dtype == torch.float32
    taps = weight_KC.shape[0]
    groups, heads, key, value = layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim
    out_TV = projected_TN.new_empty((tokens, heads * value))
    records = records_of(memory)
    function("delta_net", projected_TN.dtype)(
        pointer(projected_TN),
        group.rows,
        group.width,
        groups,
        heads,
        key,
        value,
        taps,
        pointer(weight_KC),
        pointer(layer.A_log_H),
        pointer(layer.dt_bias_H),
        layer.beta_scale,
        *(layer.dt_bias_H.dim() == 2, layer.bound or 0.0, layer.sigmoid),
        *_conv_memory(memory, group),
        *strided(memory.state_SHKW, 3),
        records,
        pointer(group.ancestors_BMM),
        pointer(layer.norm_W),
        layer.eps,
        pointer(out_TV),
    )
    return out_TV


DELTA_NET = ComposedDeltaNet(causal_conv, path_conv, l2_normalise, delta_gates, scan_window, gated_norm)
MAMBA = ComposedMamba(causal_conv, path_conv, mamba_step, scan_window, gated_norm)


def _conv_memory(memory: RecurrentMemory, group: Group) -> tuple[int | None, ...]:
    """Return the addresses and strides of the convolution's inputs and records."""
    return *_inputs_of(memory, group.state_B), *ids(group), pointer(group.tap_BMC)


def _inputs_of(memory: RecurrentMemory, slot_B: Tensor) -> tuple[int | None, ...]:
    """Return the addresses and strides of the windows and the recorded inputs."""
    window = memory.window_SIC
    return window.data_ptr(), window_stride(window), pointer(slot_B), *strided(memory.input_SRC, 1)


def _states_of(memory: RecurrentMemory, slot_B: Tensor) -> tuple[int, ...]:
    """Return the sizes of a layer's states, whether decays are by key, and where states and records are."""
    state, by_key = memory.state_SHKW, memory.decay_SRH.dim() == 4
    return *state.shape[1:], by_key, *strided(state, 3), pointer(slot_B), records_of(memory)
