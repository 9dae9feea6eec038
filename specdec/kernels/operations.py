"""The signature of every operation: what `reference`, `cpu`, `native`, `triton` and `flashinfer` share.

What an operation computes is said in its `reference.py`.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.linear.matrix import Matrix
from specdec.kernels.mamba.layer import MambaLayer
from specdec.kernels.sampling.rules import Rules
from specdec.kernels.selective_scan.layer import SelectiveLayer
from specdec.kernels.self_attention.layer import AttentionLayer, Rotation

Packed = Any
"""A weight as a form's own `pack` or `pack_experts` laid it out."""


class Pack(Protocol):
    def __call__(self, weight: Matrix | list[Matrix], bias_N: Tensor | None = None) -> Packed: ...


class Linear(Protocol):
    def __call__(self, x_TD: Tensor, packed: Packed) -> Tensor: ...


class PackHeads(Protocol):
    def __call__(self, weight_HNK: Tensor) -> Packed: ...


class LinearByHead(Protocol):
    def __call__(self, x_THK: Tensor, packed: Packed) -> Tensor: ...


class Embedding(Protocol):
    def __call__(self, table_VD: Tensor, id_T: Tensor) -> Tensor: ...


class Concat(Protocol):
    def __call__(self, *parts_TD: Tensor) -> Tensor: ...


class Add(Protocol):
    def __call__(self, x_TD: Tensor, y_TD: Tensor) -> Tensor: ...


class Scale(Protocol):
    def __call__(self, x_TD: Tensor, by: float) -> Tensor: ...


class ScatterColumns(Protocol):
    def __call__(self, x_TC: Tensor, ids_C: Tensor, width: int) -> Tensor: ...


class RmsNorm(Protocol):
    def __call__(self, x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...


class AddRmsNorm(Protocol):
    def __call__(self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor: ...


class GatedNorm(Protocol):
    def __call__(
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


class RopeTable(Protocol):
    def __call__(
        self,
        position_T: Tensor,
        dim: int,
        theta: float,
        scaling: Callable[[Tensor], Tensor] | None = None,
    ) -> Rotation: ...


class Rotate(Protocol):
    def __call__(self, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor: ...


class SelfAttention(Protocol):
    def __call__(
        self,
        projected_TN: Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None,
        pages: Tensor,
        group: Group,
    ) -> Tensor: ...


class Append(Protocol):
    def __call__(self, k_TJD: Tensor, v_TJD: Tensor | None, pages_NPXJD: Tensor, group: Group) -> None: ...


class Attend(Protocol):
    def __call__(
        self,
        q_THD: Tensor,
        pages_NPXJD: Tensor,
        group: Group,
        scale: float,
        window: int | None = None,
        value_dim: int | None = None,
    ) -> Tensor: ...


class GateHeads(Protocol):
    def __call__(self, x_THW: Tensor, gate_TH: Tensor) -> Tensor: ...


class Move(Protocol):
    def __call__(self, pages_NPXJD: Tensor, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None: ...


class CausalConv(Protocol):
    def __call__(
        self,
        x_TC: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        memory: RecurrentMemory,
        group: Group,
        *,
        silu: bool = True,
    ) -> Tensor: ...


class PathConv(Protocol):
    def __call__(
        self,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        channels: slice,
        memory: RecurrentMemory,
        slot_B: Tensor,
        path: RecordIds,
        length_B: Tensor,
    ) -> Tensor: ...


class ScanWindow(Protocol):
    def __call__(
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


class Fold(Protocol):
    def __call__(
        self,
        memory: RecurrentMemory,
        slot_B: Tensor,
        path: RecordIds,
        length_B: Tensor,
        k_path_BPGK: Tensor | None,
    ) -> None: ...


class DeltaGates(Protocol):
    def __call__(
        self,
        b_TH: Tensor,
        a_TH: Tensor,
        A_log_H: Tensor,
        dt_bias_H: Tensor,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class L2Normalise(Protocol):
    def __call__(self, x_TGK: Tensor, scale: float | Tensor) -> Tensor: ...


class DeltaNet(Protocol):
    def __call__(
        self, projected_TN: Tensor, layer: DeltaLayer, memory: RecurrentMemory, group: Group
    ) -> Tensor: ...


class PathKeys(Protocol):
    def __call__(
        self,
        layer: DeltaLayer,
        memory: RecurrentMemory,
        slot_B: Tensor,
        path: RecordIds,
        length_B: Tensor,
    ) -> Tensor: ...


class MambaStep(Protocol):
    def __call__(self, dt_TH: Tensor, dt_bias_H: Tensor, limit: tuple[float, float]) -> Tensor: ...


class Mamba(Protocol):
    def __call__(
        self, projected_TN: Tensor, layer: MambaLayer, memory: RecurrentMemory, group: Group
    ) -> Tensor: ...


class MambaKeys(Protocol):
    def __call__(
        self,
        layer: MambaLayer,
        memory: RecurrentMemory,
        slot_B: Tensor,
        path: RecordIds,
        length_B: Tensor,
    ) -> Tensor: ...


class SelectiveScan(Protocol):
    def __call__(
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


class FoldSelective(Protocol):
    def __call__(
        self,
        layer: SelectiveLayer,
        memory: RecurrentMemory,
        slot_B: Tensor,
        path: RecordIds,
        length_B: Tensor,
        x_path_BPHW: Tensor,
    ) -> None: ...


class Swiglu(Protocol):
    def __call__(self, gate_up_TI: Tensor, limit: float = math.inf) -> Tensor: ...


class Geglu(Protocol):
    def __call__(self, gate_up_TI: Tensor) -> Tensor: ...


class Relu2(Protocol):
    def __call__(self, x_TI: Tensor) -> Tensor: ...


class AddGated(Protocol):
    def __call__(self, y_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> Tensor: ...


class RouteSoftmax(Protocol):
    def __call__(self, logits_TE: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]: ...


class RouteSigmoid(Protocol):
    def __call__(
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


class PackExperts(Protocol):
    def __call__(self, weight_END: Matrix) -> Packed: ...


class Experts(Protocol):
    def __call__(
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


class Gumbel(Protocol):
    def __call__(self, seed_N: Tensor, position_N: Tensor, vocab: int) -> Tensor: ...


class Process(Protocol):
    def __call__(self, logits_NV: Tensor, rules: Rules) -> Tensor: ...


class Sample(Protocol):
    def __call__(self, logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor) -> Tensor: ...


class TopkWithNoise(Protocol):
    def __call__(
        self, logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor, count: int
    ) -> tuple[Tensor, Tensor]: ...


class Topk(Protocol):
    def __call__(self, scores_NV: Tensor, count: int) -> tuple[Tensor, Tensor]: ...


class Relations(Protocol):
    def __call__(self, parent_BM: Tensor, taps: int) -> tuple[Tensor, Tensor, Tensor]: ...


class Walk(Protocol):
    def __call__(self, chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor) -> tuple[Tensor, Tensor]: ...


class SyntheticWalk(Protocol):
    def __call__(
        self,
        chosen_BM: Tensor,
        token_BM: Tensor,
        parent_BM: Tensor,
        rate_N: Tensor,
        seed_B: Tensor,
        position_B: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Promote(Protocol):
    def __call__(
        self,
        node_BM: Tensor,
        count_B: Tensor,
        record: RecordIds,
        path: RecordIds,
        path_length_B: Tensor,
        length_B: Tensor,
    ) -> None: ...


class Children(Protocol):
    def __call__(self, share_BFK: Tensor, score_BF: Tensor, depth: int, table_3DR: Tensor) -> Tensor: ...


class Frontier(Protocol):
    def __call__(self, score_BN: Tensor, count: int) -> Tensor: ...


class Prune(Protocol):
    def __call__(
        self,
        token_BN: Tensor,
        parent_BN: Tensor,
        score_BN: Tensor,
        belief_BN: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class AttachRoot(Protocol):
    def __call__(self, root_B: Tensor, token_BN: Tensor, parent_BN: Tensor) -> tuple[Tensor, Tensor]: ...
