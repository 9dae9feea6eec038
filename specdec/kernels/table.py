"""The operations that an engine runs, chosen by name once and handed to everything that computes."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from torch import Tensor

OPERATIONS = {
    "linear": ("pack", "linear"),
    "norm": ("rms_norm", "add_rms_norm", "gated_norm"),
    "rope": ("rope_table",),
    "self_attention": ("self_attention",),
    "attention": ("move",),
    "conv": ("causal_conv", "path_conv"),
    "recurrence": ("recur", "fold"),
    "gates": ("mamba_step",),
    "delta_net": ("delta_net", "path_keys"),
    "ffn": ("swiglu", "relu2"),
    "moe": ("route_softmax", "route_sigmoid", "experts"),
    "sampling": ("gumbel", "process"),
}
"""Every operation's folder and the functions that each of its implementations must have."""

NATIVE = {
    "pointwise": ("rms_norm", "add_rms_norm", "gated_norm", "swiglu"),
    "recurrent": ("causal_conv", "path_conv", "recur", "delta_net", "path_keys"),
    "attention": ("self_attention",),
}
"""What `native` does in C for narrow windows; the rest of it is `cpu`."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Name each function once; `reference`, `cpu`, `native` and `triton` share their signatures."""

    name: str
    pack: Callable[..., Any]
    linear: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]
    rope_table: Callable[..., tuple[Tensor, Tensor]]
    self_attention: Callable[..., Tensor]
    move: Callable[..., None]
    causal_conv: Callable[..., Tensor]
    path_conv: Callable[..., Tensor]
    recur: Callable[..., Tensor]
    fold: Callable[..., None]
    delta_net: Callable[..., Tensor]
    path_keys: Callable[..., Tensor]
    mamba_step: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    relu2: Callable[..., Tensor]
    route_softmax: Callable[..., tuple[Tensor, Tensor]]
    route_sigmoid: Callable[..., tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]
    gumbel: Callable[..., Tensor]
    process: Callable[..., Tensor]


def load_kernels(name: str) -> Kernels:
    """Collect the functions of one implementation: `reference`, `cpu` or `native`."""
    found: dict[str, Any] = {}
    for operation, functions in OPERATIONS.items():
        module = import_module(f"specdec.kernels.{operation}.{'cpu' if name == 'native' else name}")
        found |= {function: getattr(module, function) for function in functions}
    if name == "native":
        for name_of_file, functions in NATIVE.items():
            module = import_module(f"specdec.kernels.native.{name_of_file}")
            found |= {function: getattr(module, function) for function in functions}
    assert found.keys() == {field.name for field in fields(Kernels)} - {"name"}
    return Kernels(name, **found)
