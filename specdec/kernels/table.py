"""The engine's kernel table: every operation, chosen by backend name once and passed to all compute code."""

import inspect
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Protocol, cast

from torch import Tensor

from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.linear.matrix import Matrix
from specdec.kernels.mamba.layer import MambaLayer
from specdec.kernels.sampling.rules import Rules
from specdec.kernels.selective_scan.layer import SelectiveLayer
from specdec.kernels.self_attention.layer import AttentionLayer, Rotation

Packed = Any
"""A weight in the layout of a backend's own `pack` or `pack_experts`."""


class Kernels(Protocol):
    """One implementation of every operation; each operation's `reference.py` specifies it.

    Other forms document only what they do differently.
    """

    name: str

    def pack(self, weight: Matrix | list[Matrix], bias_N: Tensor | None = None) -> Packed: ...

    def linear(self, x_TD: Tensor, packed: Packed) -> Tensor: ...

    def pack_heads(self, weight_HNK: Tensor) -> Packed: ...

    def linear_by_head(self, x_THK: Tensor, packed: Packed) -> Tensor: ...

    def embedding(self, table_VD: Tensor, id_T: Tensor) -> Tensor: ...

    def concat(self, *parts_TD: Tensor) -> Tensor: ...

    def add(self, x_TD: Tensor, y_TD: Tensor) -> Tensor: ...

    def scale(self, x_TD: Tensor, by: float) -> Tensor: ...

    def scatter_columns(self, x_TC: Tensor, ids_C: Tensor, width: int) -> Tensor: ...

    def rms_norm(self, x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor: ...

    def gated_norm(
        self,
        x_TD: Tensor,
        gate_TD: Tensor,
        weight_D: Tensor | None,
        eps: float,
        group_size: int,
        *,
        gate_first: bool,
        sigmoid: bool = False,
    ) -> Tensor: ...

    def rope_table(
        self, position_T: Tensor, dim: int, theta: float, scaling: Callable[[Tensor], Tensor] | None = None
    ) -> Rotation: ...

    def self_attention(
        self,
        projected_TN: Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None,
        pages: Tensor,
        group: Group,
    ) -> Tensor: ...

    def gate_heads(self, x_THW: Tensor, gate_TH: Tensor) -> Tensor: ...

    def move(self, pages_NPXJD: Tensor, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None: ...

    def causal_conv(
        self,
        x_TC: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        memory: RecurrentMemory,
        group: Group,
        *,
        silu: bool = True,
    ) -> Tensor: ...

    def path_conv(
        self,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        channels: slice,
        memory: RecurrentMemory,
        slot_B: Tensor,
        path: RecordIds,
        length_B: Tensor,
    ) -> Tensor: ...

    def scan_window(
        self,
        q_TGK: Tensor,
        k_TGK: Tensor,
        v_THW: Tensor,
        decay_TH: Tensor,
        beta_TH: Tensor | None,
        memory: RecurrentMemory,
        group: Group,
        k_path_BPGK: Tensor | None,
    ) -> Tensor: ...

    def fold(
        self,
        memory: RecurrentMemory,
        slot_B: Tensor,
        path: RecordIds,
        length_B: Tensor,
        k_path_BPGK: Tensor | None,
    ) -> None: ...

    def delta_net(
        self, projected_TN: Tensor, layer: DeltaLayer, memory: RecurrentMemory, group: Group
    ) -> Tensor: ...

    def path_keys(
        self, layer: DeltaLayer, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor
    ) -> Tensor: ...

    def mamba(
        self, projected_TN: Tensor, layer: MambaLayer, memory: RecurrentMemory, group: Group
    ) -> Tensor: ...

    def mamba_keys(
        self, layer: MambaLayer, memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor
    ) -> Tensor: ...

    def selective_scan(
        self,
        x_THW: Tensor,
        gate_THW: Tensor,
        dt_THW: Tensor,
        k_THK: Tensor,
        q_THK: Tensor,
        layer: SelectiveLayer,
        memory: RecurrentMemory,
        group: Group,
        x_path_BPHW: Tensor | None,
    ) -> Tensor: ...

    def fold_selective(
        self,
        layer: SelectiveLayer,
        memory: RecurrentMemory,
        slot_B: Tensor,
        path: RecordIds,
        length_B: Tensor,
        x_path_BPHW: Tensor,
    ) -> None: ...

    def swiglu(self, gate_up_TI: Tensor, limit: float = math.inf) -> Tensor: ...

    def geglu(self, gate_up_TI: Tensor) -> Tensor: ...

    def relu2(self, x_TI: Tensor) -> Tensor: ...

    def add_gated(self, y_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> Tensor: ...

    def route_softmax(self, logits_TE: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]: ...

    def route_sigmoid(
        self,
        logits_TE: Tensor,
        bias_E: Tensor,
        top_k: int,
        *,
        groups: int,
        top_groups: int,
        renormalise: bool,
        scale: float,
        eps: float = 1e-20,
    ) -> tuple[Tensor, Tensor]: ...

    def pack_experts(self, weight_END: Matrix) -> Packed: ...

    def experts(
        self,
        x_TD: Tensor,
        up_EID: Packed,
        down_EDI: Packed,
        index_TA: Tensor,
        weight_TA: Tensor,
        *,
        gated: bool,
        limit: float = math.inf,
    ) -> Tensor: ...

    def gumbel(self, seed_N: Tensor, position_N: Tensor, vocab: int) -> Tensor: ...

    def process(self, logits_NV: Tensor, rules: Rules) -> Tensor: ...

    def sample(self, logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor) -> Tensor: ...

    def topk_with_noise(
        self, logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor, count: int
    ) -> tuple[Tensor, Tensor]: ...

    def topk(self, scores_NV: Tensor, count: int) -> tuple[Tensor, Tensor]: ...

    def relations(self, parent_BM: Tensor, taps: int) -> tuple[Tensor, Tensor, Tensor]: ...

    def walk(self, chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor) -> tuple[Tensor, Tensor]: ...

    def accept_at_rates(
        self,
        chosen_BM: Tensor,
        token_BM: Tensor,
        parent_BM: Tensor,
        rate_N: Tensor,
        seed_B: Tensor,
        position_B: Tensor,
    ) -> tuple[Tensor, Tensor]: ...

    def promote(
        self,
        node_BM: Tensor,
        count_B: Tensor,
        record: RecordIds,
        path: RecordIds,
        path_length_B: Tensor,
        length_B: Tensor,
    ) -> None: ...

    def children(self, prob_BFK: Tensor, score_BF: Tensor, depth: int, table_3DR: Tensor) -> Tensor: ...

    def frontier(self, score_BN: Tensor, count: int) -> Tensor: ...

    def prune(
        self, token_BN: Tensor, parent_BN: Tensor, score_BN: Tensor, belief_BN: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


OPERATIONS = tuple(name for name, _ in inspect.getmembers(Kernels, inspect.isfunction) if name[0] != "_")

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
"""Modules, or objects in them, that define each backend's operations; later entries override earlier ones.

`native` runs narrow windows in C and `triton` runs on a GPU; both take everything else from `cpu`.
"""

PLACES["flashinfer"] = (*PLACES["triton"], "self_attention.flashinfer:FlashInferAttention")
"""Triton's, except for the attention that FlashInfer supports; each table has its own FlashInfer
workspace."""


def on_gpu(name: str) -> bool:
    """Return whether a backend runs on a GPU: no host synchronisation, 8-bit weights read as stored."""
    return name in ("triton", "flashinfer")


def load_kernels(name: str) -> Kernels:
    """Build the operation table of one backend.

    Each engine needs its own table: a class in `PLACES` is instantiated for each.
    """
    found = {operation: function for module in PLACES[name] for operation, function in _defined_at(module)}
    return cast(Kernels, SimpleNamespace(name=name, **found))


def replaced(kernels: Kernels, **operations: Callable[..., Any]) -> Kernels:
    """Return kernels with some operations replaced."""
    return cast(Kernels, SimpleNamespace(**vars(kernels) | operations))


def _defined_at(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the operations that a module or object defines itself, without those it imports."""
    file, _, attribute = path.partition(":")
    source: Any = import_module(f"specdec.kernels.{file}")
    module = source.__name__
    if attribute:
        source = getattr(source, attribute)
        source = source() if isinstance(source, type) else source
        module = type(source).__module__
    for operation in OPERATIONS:
        function = getattr(source, operation, None)
        if function is not None and function.__module__ == module:
            yield operation, function
