"""The operations that an engine runs, chosen by name once and handed to everything that computes."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from specdec.kernels import operations as op


@dataclass(frozen=True, slots=True)
class Kernels:
    """One form of every operation."""

    name: str
    pack: op.Pack
    linear: op.Linear
    pack_heads: op.PackHeads
    linear_by_head: op.LinearByHead
    embedding: op.Embedding
    concat: op.Concat
    add: op.Add
    scale: op.Scale
    scatter_columns: op.ScatterColumns
    rms_norm: op.RmsNorm
    add_rms_norm: op.AddRmsNorm
    gated_norm: op.GatedNorm
    rope_table: op.RopeTable
    self_attention: op.SelfAttention
    gate_heads: op.GateHeads
    move: op.Move
    causal_conv: op.CausalConv
    path_conv: op.PathConv
    scan_window: op.ScanWindow
    fold: op.Fold
    delta_net: op.DeltaNet
    path_keys: op.PathKeys
    mamba: op.Mamba
    mamba_keys: op.MambaKeys
    selective_scan: op.SelectiveScan
    fold_selective: op.FoldSelective
    swiglu: op.Swiglu
    geglu: op.Geglu
    relu2: op.Relu2
    add_gated: op.AddGated
    route_softmax: op.RouteSoftmax
    route_sigmoid: op.RouteSigmoid
    pack_experts: op.PackExperts
    experts: op.Experts
    gumbel: op.Gumbel
    process: op.Process
    sample: op.Sample
    topk_with_noise: op.TopkWithNoise
    topk: op.Topk
    relations: op.Relations
    walk: op.Walk
    synthetic_walk: op.SyntheticWalk
    promote: op.Promote
    children: op.Children
    frontier: op.Frontier
    prune: op.Prune
    attach_root: op.AttachRoot


OPERATIONS = tuple(field.name for field in fields(Kernels) if field.name != "name")

_FOLDERS = (
    *("linear", "gather", "norm", "rope", "attention", "conv", "recurrence", "selective_scan"),
    *("ffn", "moe", "sampling", "tree"),
)
_COMPOSED = ("self_attention", "delta_net", "mamba")
_REFERENCE, _CPU = (
    (
        *(f"{folder}.{form}" for folder in _FOLDERS),
        *(f"{folder}.composed:{form.upper()}" for folder in _COMPOSED),
    )
    for form in ("reference", "cpu")
)
_NATIVE = (
    *("native.linear", "native.gather", "native.pointwise", "native.moe", "native.attention"),
    "native.sampling",
    *("native.recurrent:DELTA_NET", "native.recurrent:MAMBA", "native.recurrent"),
    "native.selective",
)
_TRITON = (
    *("linear", "ffn", "routing", "moe", "norm", "sampling", "tree", "kv_cache", "conv", "recurrence"),
    "selective_scan",
    *_COMPOSED,
)

PLACES: dict[str, tuple[str, ...]] = {
    "reference": _REFERENCE,
    "cpu": _CPU,
    "native": (*_CPU, *_NATIVE),
    "triton": (*_CPU, *(f"{folder}.triton" for folder in _TRITON)),
}
"""Where each form's operations stand: a file, or an object in it; of two with one name the later counts.

`native` computes narrow windows in C, and `triton` computes on a GPU; the rest of both is `cpu`.
"""

PLACES["flashinfer"] = (*PLACES["triton"], "self_attention.flashinfer:Attention")
"""Triton's, but for the attention that FlashInfer takes, in memory that each table has for itself."""


def on_gpu(name: str) -> bool:
    """Tell whether these kernels are a GPU's: they never ask the host, and read 8-bit weights as they are."""
    return name in ("triton", "flashinfer")


def load_kernels(name: str) -> Kernels:
    """Collect the operations of one form.

    Each engine needs a table of its own: a class that is named behind a file is made anew for each.
    """
    found = {operation: function for place in PLACES[name] for operation, function in _defined_at(place)}
    return Kernels(name, **found)


def _defined_at(place: str) -> Iterator[tuple[str, Any]]:
    """Yield the operations that a place defines; what it imports is another place's."""
    file, _, attribute = place.partition(":")
    source: Any = import_module(f"specdec.kernels.{file}")
    home = source.__name__
    if attribute:
        source = getattr(source, attribute)
        source = source() if isinstance(source, type) else source
        home = type(source).__module__
    for operation in OPERATIONS:
        function = getattr(source, operation, None)
        if function is not None and function.__module__ == home:
            yield operation, function
