"""The operations that an engine runs, chosen by name once and handed to everything that computes."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from torch import Tensor

OPERATIONS = {
    "linear": ("pack", "linear"),
    "gather": ("embedding", "concat", "add", "scatter_columns"),
    "norm": ("rms_norm", "add_rms_norm", "gated_norm"),
    "rope": ("rope_table",),
    "self_attention": ("self_attention",),
    "attention": ("move",),
    "conv": ("causal_conv", "path_conv"),
    "recurrence": ("scan_window", "fold"),
    "delta_net": ("delta_net", "path_keys"),
    "mamba": ("mamba", "mamba_keys"),
    "ffn": ("swiglu", "relu2", "add_gated"),
    "moe": ("route_softmax", "route_sigmoid", "pack_experts", "experts"),
    "sampling": ("gumbel", "process", "sample", "topk_with_noise", "topk"),
    "tree": (
        *("relations", "walk", "synthetic_walk", "promote"),
        *("children", "frontier", "prune", "attach_root"),
    ),
}
"""Every operation's folder and the functions that each of its implementations must have."""

SPECIAL: dict[str, dict[str, tuple[str, ...]]] = {
    "native": {
        "native.linear": ("pack", "linear"),
        "native.gather": ("embedding", "concat", "add", "scatter_columns"),
        "native.pointwise": ("rms_norm", "add_rms_norm", "gated_norm", "swiglu"),
        "native.recurrent": (
            *("causal_conv", "path_conv", "scan_window"),
            *("delta_net", "path_keys", "mamba", "mamba_keys"),
        ),
        "native.attention": ("self_attention",),
        "native.sampling": ("gumbel", "sample", "topk_with_noise", "topk"),
    },
    "triton": {
        "linear.triton": ("pack", "linear"),
        "ffn.triton": ("swiglu", "relu2", "add_gated"),
        "routing.triton": ("route_softmax", "route_sigmoid"),
        "moe.triton": ("pack_experts", "experts"),
        "norm.triton": ("rms_norm", "add_rms_norm", "gated_norm"),
        "sampling.triton": ("sample", "topk_with_noise"),
        "tree.triton": (
            *("relations", "walk", "synthetic_walk", "promote"),
            *("children", "frontier", "prune"),
        ),
        "self_attention.triton": ("self_attention",),
        "attention.triton": ("move",),
        "conv.triton": ("causal_conv", "path_conv"),
        "recurrence.triton": ("scan_window", "fold"),
        "delta_net.triton": ("delta_net", "path_keys"),
        "mamba.triton": ("mamba", "mamba_keys"),
    },
}
"""What `native` does in C for narrow windows, and `triton` on a GPU; the rest of both is `cpu`."""

SPECIAL["flashinfer"] = SPECIAL["triton"] | {"self_attention.flashinfer:Attention": ("self_attention",)}
"""Triton's, but for the attention that FlashInfer takes, in memory that each table has for itself."""


def on_gpu(name: str) -> bool:
    """Tell whether these kernels are a GPU's: they never ask the host, and read 8-bit weights as they are."""
    return name in ("triton", "flashinfer")


@dataclass(frozen=True, slots=True)
class Kernels:
    """Name each function once; `reference`, `cpu`, `native` and `triton` share their signatures."""

    name: str
    pack: Callable[..., Any]
    linear: Callable[..., Tensor]
    embedding: Callable[..., Tensor]
    concat: Callable[..., Tensor]
    add: Callable[..., Tensor]
    scatter_columns: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]
    rope_table: Callable[..., tuple[Tensor, Tensor]]
    self_attention: Callable[..., Tensor]
    move: Callable[..., None]
    causal_conv: Callable[..., Tensor]
    path_conv: Callable[..., Tensor]
    scan_window: Callable[..., Tensor]
    fold: Callable[..., None]
    delta_net: Callable[..., Tensor]
    path_keys: Callable[..., Tensor]
    mamba: Callable[..., Tensor]
    mamba_keys: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    relu2: Callable[..., Tensor]
    add_gated: Callable[..., Tensor]
    route_softmax: Callable[..., tuple[Tensor, Tensor]]
    route_sigmoid: Callable[..., tuple[Tensor, Tensor]]
    pack_experts: Callable[..., Any]
    experts: Callable[..., Tensor]
    gumbel: Callable[..., Tensor]
    process: Callable[..., Tensor]
    sample: Callable[..., Tensor]
    topk_with_noise: Callable[..., tuple[Tensor, Tensor]]
    topk: Callable[..., tuple[Tensor, Tensor]]
    relations: Callable[..., tuple[Tensor, Tensor, Tensor]]
    walk: Callable[..., tuple[Tensor, Tensor]]
    synthetic_walk: Callable[..., tuple[Tensor, Tensor, Tensor]]
    promote: Callable[..., None]
    children: Callable[..., Tensor]
    frontier: Callable[..., Tensor]
    prune: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    attach_root: Callable[..., tuple[Tensor, Tensor]]


def load_kernels(name: str) -> Kernels:
    """Collect the functions of one implementation: `reference`, `cpu`, or one of `SPECIAL`.

    Each engine needs a table of its own: a class that is named behind a file is made anew for each.
    """
    special = SPECIAL.get(name, {})
    folders = {f"{operation}.{'cpu' if special else name}": own for operation, own in OPERATIONS.items()}
    found: dict[str, Any] = {}
    for place, functions in (folders | special).items():
        file, _, owner = place.partition(":")
        source: Any = import_module(f"specdec.kernels.{file}")
        if owner:
            source = getattr(source, owner)()
        found |= {function: getattr(source, function) for function in functions}
    assert found.keys() == {field.name for field in fields(Kernels)} - {"name"}
    return Kernels(name, **found)
