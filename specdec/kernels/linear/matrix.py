"""Storage types of weights: a tensor in the model's dtype, or a quantised format."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from specdec.kernels.linear.fp8 import Fp8
from specdec.kernels.linear.integers import Integers

Stored = Tensor | Fp8
"""Storage types that checkpoints are loaded as."""
Matrix = Stored | Integers


def widen(matrix: Matrix, dtype: torch.dtype | None = None) -> Tensor:
    """Return a matrix as a plain tensor, by default in the model's dtype.

    Dequantisation is in float32. Experts are widened one by one.
    """
    dtype = dtype or matrix.dtype
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    if len(matrix.shape) == 3:
        out_END = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
        for expert, out_ND in enumerate(out_END):
            out_ND.copy_(widen(matrix.expert(expert), dtype))
        return out_END
    return matrix.wide(dtype) if isinstance(matrix, Integers) else matrix.wide().to(dtype)


def expert_of(matrix: Matrix, expert: int) -> Matrix:
    """Return a view of one expert's matrix."""
    return matrix[expert] if isinstance(matrix, Tensor) else matrix.expert(expert)


def join(parts: Sequence[Matrix]) -> list[Matrix]:
    """Stack matrices of equal width; adjacent ones of different kinds stay separate."""
    return reduce(_put_below, parts, [])


def _put_below(above: list[Matrix], part: Matrix) -> list[Matrix]:
    last = above[-1] if above else None
    joined: Matrix | None = None
    if isinstance(last, Tensor) and isinstance(part, Tensor):
        joined = torch.cat([last, part])
    elif isinstance(last, Fp8) and isinstance(part, Fp8):  # noqa: SIM114 (types)
        joined = last.above(part)
    elif isinstance(last, Integers) and isinstance(part, Integers):
        joined = last.above(part)
    return [*above, part] if joined is None else [*above[:-1], joined]
