"""Mixtures of experts whose weights are whole numbers; others are multiplied as `moe.cpu` does."""

from functools import partial

from torch import Tensor

from specdec.kernels.linear.integers import Integers
from specdec.kernels.linear.matrix import Matrix
from specdec.kernels.moe import cpu
from specdec.kernels.native.linear import WholePanels, lay_whole, linear

Packed = Tensor | tuple[WholePanels, ...]


def pack_experts(weight_END: Matrix) -> Packed:
    """Lay each expert's weight of whole numbers out in panels."""
    if not isinstance(weight_END, Integers):
        return cpu.pack_experts(weight_END)
    return tuple(lay_whole(weight_END.expert(expert)) for expert in range(weight_END.shape[0]))


def experts(
    x_TD: Tensor, up_EID: Packed, down_EDI: Packed, index_TA: Tensor, weight_TA: Tensor, *, gated: bool
) -> Tensor:
    """Add up what each token's experts answer, times their weights."""
    up, down = _multiplier(up_EID), _multiplier(down_EDI)
    return cpu.mix(x_TD, up, down, index_TA, weight_TA, gated=gated)


def _multiplier(packed: Packed) -> cpu.Multiply:
    if isinstance(packed, Tensor):
        return partial(cpu.multiply, packed)
    return lambda expert, x_PD: linear(x_PD, packed[expert])
