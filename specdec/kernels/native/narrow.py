"""The C operations behind the signatures of their plain forms, which serve what is not narrow."""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.attention import cpu as attention
from specdec.kernels.conv import cpu as conv
from specdec.kernels.delta_net import cpu as plain_delta_net
from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.ffn import cpu as ffn
from specdec.kernels.gates import cpu as gates
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.native.library import library
from specdec.kernels.norm import cpu as norm
from specdec.kernels.recurrence import cpu as recurrence
from specdec.kernels.rope import cpu as rope

TOKENS = 32
"""The widest step that is served: beyond it arithmetic outweighs calls, and threads help."""
STATE_BYTES = 1 << 17
"""A larger state is better worked on by all threads than by one."""
ATTENTION_WORK = 1 << 21
"""Multiplications of queries with keys up to which one thread is enough."""

SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

Pointer, Count, Real, Flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int

ARGUMENTS = {
    "rms_norm": "p nnn nn p f p",
    "add_rms_norm": "pp nn p f p",
    "gated_norm": "pp nnn n p n f i p",
    "swiglu": "p nn n p",
    "l2_normalise": "p nnn n f p",
    "delta_gates": "pp nn nn pp pp",
    "rotate": "p nnnn nn pp p",
    "causal_conv": "p nnn n n pp p n p p nn ppp n pp p p p",
    "append": "pp nnn nn p nn n p n p",
    "attend": "p nnnnn nn p nn n p n pp f pp",
    "recur": "ppppp p nnnnnn p n p p ppp n pp p",
    "delta_inputs": "p nn nnnn n ppp p n p p nn ppp n pp p p ppppp",
}
KINDS = {"p": Pointer, "n": Count, "f": Real, "i": Flag}


class Records(ctypes.Structure):
    """Mirror `records` of narrow.c."""

    _fields_ = [
        *((name, Pointer) for name in ("key", "update", "decay")),
        *((name, Count) for name in ("key_slab", "key_place", "update_slab", "update_place")),
        *((name, Count) for name in ("decay_slab", "decay_place")),
    ]


@functools.cache
def _function(name: str, dtype: torch.dtype | None = None) -> Callable[..., None]:
    loaded = library()
    assert loaded is not None
    function = getattr(loaded, f"{name}_{SUFFIX[dtype]}" if dtype else name)
    function.argtypes = [KINDS[letter] for letter in ARGUMENTS[name].replace(" ", "")]
    function.restype = None
    return function  # type: ignore[no-any-return]


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise [T, D] or [T, H, D], strided over tokens and heads."""
    if not _serves(x_D) or x_D.stride(-1) != 1 or weight_D.dtype != torch.float32:
        return norm.rms_norm(x_D, weight_D, eps)
    out_D = torch.empty(x_D.shape, dtype=x_D.dtype)
    heads, by_head = (x_D.shape[1], x_D.stride(1)) if x_D.ndim == 3 else (1, 0)
    _function("rms_norm", x_D.dtype)(
        x_D.data_ptr(),
        x_D.shape[0],
        heads,
        x_D.shape[-1],
        x_D.stride(0),
        by_head,
        weight_D.data_ptr(),
        eps,
        out_D.data_ptr(),
    )
    return out_D


def add_rms_norm(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add and normalise dense rows in one call."""
    if y_TD is None:
        return rms_norm(x_TD, weight_D, eps)
    dense = x_TD.is_contiguous() and y_TD.is_contiguous() and y_TD.dtype == x_TD.dtype
    if not dense or not _serves(x_TD) or weight_D.dtype != torch.float32:
        return norm.add_rms_norm(x_TD, y_TD, weight_D, eps)
    out_TD = torch.empty_like(x_TD)
    _function("add_rms_norm", x_TD.dtype)(
        x_TD.data_ptr(), y_TD.data_ptr(), *x_TD.shape, weight_D.data_ptr(), eps, out_TD.data_ptr()
    )
    return out_TD


def gated_norm(
    x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor, eps: float, group_size: int, *, gate_first: bool
) -> Tensor:
    """Normalise runs of a float32 tensor and gate them."""
    if not _serves(gate_TD) or gate_TD.stride(-1) != 1 or weight_D.dtype != gate_TD.dtype:
        return norm.gated_norm(x_TD, gate_TD, weight_D, eps, group_size, gate_first=gate_first)
    x_TD = x_TD.float().contiguous()
    out_TD = torch.empty(gate_TD.shape, dtype=gate_TD.dtype)
    _function("gated_norm", gate_TD.dtype)(
        x_TD.data_ptr(),
        gate_TD.data_ptr(),
        x_TD.shape[0],
        gate_TD.shape[1] // group_size,
        group_size,
        gate_TD.stride(0),
        weight_D.data_ptr(),
        group_size if weight_D.numel() > group_size else 0,
        eps,
        gate_first,
        out_TD.data_ptr(),
    )
    return out_TD


def swiglu(gate_up_T2I: Tensor) -> Tensor:
    """Return silu(gate) · up for rows [gate | up]."""
    if not _serves(gate_up_T2I) or gate_up_T2I.stride(-1) != 1:
        return ffn.swiglu(gate_up_T2I)
    tokens, double = gate_up_T2I.shape
    out_TI = torch.empty((tokens, double // 2), dtype=gate_up_T2I.dtype)
    _function("swiglu", out_TI.dtype)(
        gate_up_T2I.data_ptr(), tokens, double // 2, gate_up_T2I.stride(0), out_TI.data_ptr()
    )
    return out_TI


def l2_normalise(x_TGK: Tensor, scale: float | Tensor) -> Tensor:
    """Give heads that lie side by side the length `scale`, in float32."""
    if not _serves(x_TGK) or isinstance(scale, Tensor) or x_TGK.stride()[1:] != (x_TGK.shape[2], 1):
        return gates.l2_normalise(x_TGK, scale)
    out_TGK = torch.empty(x_TGK.shape)
    _function("l2_normalise", x_TGK.dtype)(
        x_TGK.data_ptr(), *x_TGK.shape, x_TGK.stride(0), scale, out_TGK.data_ptr()
    )
    return out_TGK


def delta_gates(b_TH: Tensor, a_TH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-decay and the write strength of each head."""
    if not _serves(b_TH) or b_TH.stride(1) != 1 or a_TH.stride(1) != 1:
        return gates.delta_gates(b_TH, a_TH, A_log_H, dt_bias_H)
    out_2TH = torch.empty((2, *b_TH.shape))
    decay_TH, beta_TH = out_2TH.unbind()
    _function("delta_gates", b_TH.dtype)(
        b_TH.data_ptr(),
        a_TH.data_ptr(),
        *b_TH.shape,
        b_TH.stride(0),
        a_TH.stride(0),
        A_log_H.data_ptr(),
        dt_bias_H.data_ptr(),
        decay_TH.data_ptr(),
        beta_TH.data_ptr(),
    )
    return decay_TH, beta_TH


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2R entries of each head."""
    if not _serves(x_THD) or x_THD.stride(2) != 1:
        return rope.rotate(x_THD, cos_TR, sin_TR)
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype)
    _function("rotate", x_THD.dtype)(
        x_THD.data_ptr(),
        *x_THD.shape,
        cos_TR.shape[1],
        x_THD.stride(0),
        x_THD.stride(1),
        cos_TR.data_ptr(),
        sin_TR.data_ptr(),
        out_THD.data_ptr(),
    )
    return out_THD


def causal_conv(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, memory: RecurrentMemory, group: Group
) -> Tensor:
    """Convolve a narrow window with a float32 weight that lies [K, C] in memory."""
    weight_KC = weight_CK.t()
    fits = weight_KC.dtype == torch.float32 and weight_KC.is_contiguous() and x_TC.stride(1) == 1
    if not fits or not _serves(x_TC):
        return conv.causal_conv(x_TC, weight_CK, bias_C, memory, group)
    bias_C = None if bias_C is None else bias_C.float()
    taps, channels = weight_KC.shape
    path, length_B, record_ids = _ids(group.path), group.path_length_B, _ids(group.record)
    longest = 0 if group.path is None else group.path.slab_BN.shape[1]
    window, record = memory.window_SIC, memory.input_SRC
    scratch = torch.empty((longest + taps - 1 + group.width) * channels, dtype=x_TC.dtype)
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    _function("causal_conv", x_TC.dtype)(
        x_TC.data_ptr(),
        group.rows,
        group.width,
        channels,
        taps,
        x_TC.stride(0),
        weight_KC.data_ptr(),
        _pointer(bias_C),
        window.data_ptr(),
        window.stride(0),
        group.state_B.data_ptr(),
        record.data_ptr(),
        record.stride(0),
        record.stride(1),
        *map(_pointer, (*path, length_B)),
        longest,
        *map(_pointer, record_ids),
        _pointer(group.tap_BMC),
        scratch.data_ptr(),
        out_TC.data_ptr(),
    )
    return out_TC


def recur(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THW: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor | None,
    memory: RecurrentMemory,
    group: Group,
) -> Tensor:
    """Run the recurrence over a narrow window in float32, where one thread is enough for the states."""
    state = memory.state_SHKW
    small = state[0].numel() * state.itemsize <= STATE_BYTES
    fits = state.dtype == q_TGK.dtype == v_THW.dtype == torch.float32
    if not small or not fits or not _serves(q_TGK):
        return recurrence.recur(q_TGK, k_TGK, v_THW, decay_TH, beta_TH, memory, group)
    out_THW = torch.empty(v_THW.shape)
    key, update, decay = memory.key_SRGK, memory.update_SRHW, memory.decay_SRH
    strides = (stride for part in (key, update, decay) for stride in part.stride()[:2])
    records = Records(key.data_ptr(), update.data_ptr(), decay.data_ptr(), *strides)
    path, length_B, record_ids = _ids(group.path), group.path_length_B, _ids(group.record)
    q_TGK, k_TGK, v_THW, decay_TH = (x.contiguous() for x in (q_TGK, k_TGK, v_THW, decay_TH))
    _function("recur")(
        *(x.data_ptr() for x in (q_TGK, k_TGK, v_THW, decay_TH)),
        _pointer(beta_TH),
        out_THW.data_ptr(),
        group.rows,
        group.width,
        k_TGK.shape[1],
        v_THW.shape[1],
        k_TGK.shape[2],
        v_THW.shape[2],
        state.data_ptr(),
        state.stride(0),
        group.state_B.data_ptr(),
        ctypes.addressof(records),
        *map(_pointer, (*path, length_B)),
        0 if group.path is None else group.path.slab_BN.shape[1],
        *map(_pointer, record_ids),
        _pointer(group.ancestors_BMM),
    )
    return out_THW


def delta_net(projected_TN: Tensor, layer: DeltaLayer, memory: RecurrentMemory, group: Group) -> Tensor:
    """Run a gated delta net between its projections: what feeds the recurrence in one call."""
    if not _serves(projected_TN) or memory.state_SHKW.dtype != torch.float32:
        return plain_delta_net.delta_net(projected_TN, layer, memory, group)
    tokens, columns = projected_TN.shape
    weight_KC = layer.conv_CK.t()
    taps, channels = weight_KC.shape
    path, length_B, record_ids = _ids(group.path), group.path_length_B, _ids(group.record)
    longest = 0 if group.path is None else group.path.slab_BN.shape[1]
    window, record = memory.window_SIC, memory.input_SRC
    scratch = projected_TN.new_empty((longest + taps - 1 + group.width + tokens) * channels)
    groups, heads, key, value = layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim
    inputs = torch.empty(tokens * (2 * groups * key + heads * value + 2 * heads))
    sizes = [tokens * n for n in (groups * key, groups * key, heads * value, heads, heads)]
    q_TN, k_TN, v_TN, decay_TN, beta_TN = inputs.split_with_sizes(sizes)
    _function("delta_inputs", projected_TN.dtype)(
        projected_TN.data_ptr(),
        group.rows,
        group.width,
        groups,
        heads,
        key,
        value,
        taps,
        weight_KC.data_ptr(),
        layer.A_log_H.data_ptr(),
        layer.dt_bias_H.data_ptr(),
        window.data_ptr(),
        window.stride(0),
        group.state_B.data_ptr(),
        record.data_ptr(),
        record.stride(0),
        record.stride(1),
        *map(_pointer, (*path, length_B)),
        longest,
        *map(_pointer, record_ids),
        _pointer(group.tap_BMC),
        scratch.data_ptr(),
        *(part.data_ptr() for part in (q_TN, k_TN, v_TN, decay_TN, beta_TN)),
    )
    o_THW = recur(
        q_TN.view(tokens, groups, key),
        k_TN.view(tokens, groups, key),
        v_TN.view(tokens, heads, value),
        decay_TN.view(tokens, heads),
        beta_TN.view(tokens, heads),
        memory,
        group,
    )
    z_TV = projected_TN[:, channels : columns - 2 * heads]
    return gated_norm(o_THW.reshape(tokens, -1), z_TV, layer.norm_W, layer.eps, value, gate_first=False)


def append(k_TJD: Tensor, v_TJD: Tensor, pages_NPXJD: Tensor, group: Group) -> None:
    """Write keys and values whose heads lie side by side."""
    if not _serves(k_TJD) or not _dense_heads(k_TJD) or not _dense_heads(v_TJD):
        return attention.append(k_TJD, v_TJD, pages_NPXJD, group)
    _function("append", k_TJD.dtype)(
        k_TJD.data_ptr(),
        v_TJD.data_ptr(),
        group.rows,
        group.width,
        k_TJD.shape[1] * k_TJD.shape[2],
        k_TJD.stride(0),
        v_TJD.stride(0),
        pages_NPXJD.data_ptr(),
        *pages_NPXJD.stride()[:2],
        pages_NPXJD.shape[2],
        group.table_BN.data_ptr(),
        group.table_BN.shape[1],
        group.length_B.data_ptr(),
    )


def attend(q_THD: Tensor, pages_NPXJD: Tensor, group: Group, scale: float) -> Tensor:
    """Attend to what the table names without gathering it, where one thread is enough."""
    work = q_THD.numel() * (group.max_length + group.width)
    if not _serves(q_THD) or work > ATTENTION_WORK or q_THD.stride(2) != 1:
        return attention.attend(q_THD, pages_NPXJD, group, scale)
    _, heads, dim = q_THD.shape
    kv_heads = pages_NPXJD.shape[3]
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    longest = group.max_length + group.width
    scratch = torch.empty(group.width * (heads // kv_heads) * longest)
    _function("attend", q_THD.dtype)(
        q_THD.data_ptr(),
        group.rows,
        group.width,
        heads,
        kv_heads,
        dim,
        *q_THD.stride()[:2],
        pages_NPXJD.data_ptr(),
        *pages_NPXJD.stride()[:2],
        pages_NPXJD.shape[2],
        group.table_BN.data_ptr(),
        group.table_BN.shape[1],
        group.length_B.data_ptr(),
        _pointer(group.ancestors_BMM),
        scale,
        scratch.data_ptr(),
        out_THD.data_ptr(),
    )
    return out_THD


def _serves(x_T: Tensor) -> bool:
    """Tell whether a packed tensor is narrow, on a CPU, of a type that the C forms know."""
    return x_T.shape[0] <= TOKENS and x_T.is_cpu and x_T.dtype in SUFFIX


def _dense_heads(x_TJD: Tensor) -> bool:
    return x_TJD.stride()[1:] == (x_TJD.shape[2], 1)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _ids(ids: RecordIds | None) -> tuple[Tensor | None, Tensor | None]:
    """Return dense slabs and places, to be kept while their addresses are in use."""
    return (None, None) if ids is None else (ids.slab_BN.contiguous(), ids.index_BN.contiguous())
