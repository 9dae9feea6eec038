"""Integer weights of 8, 6 or 4 bits, with a scale per output, or per 32 or 16 inputs of an output.

Our own quantisation is symmetric. Published matrices may also have zero points, offsets (GGUF's Q4_1, Q4_K
and Q5_K), or a scale per 16 inputs (its Q6_K).

CPUs also multiply in integers: activations are quantised to 8 bits in groups of 32. The sum of a group is
then exact in any order, so a row's result need not depend on the number of rows in the batch. GPUs do not
quantise activations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.linear.fp8 import Fp8

GROUP = 32
"""Inputs per quantisation group; the last group of a row may be smaller."""
HALF = GROUP // 2
"""Inputs per scale in some published matrices."""
LARGEST = 127
"""Largest 8-bit integer; −128 is not used."""
SMALLEST = 1e-36
"""Groups of activations whose entries are all smaller count as 0."""
SMALLEST_OF_4 = -8
LARGEST_OF_4 = (-8.0, -7.5, -7.0, -8.5, -9.0, -6.5, 7.5)
"""Candidate 4-bit values for a group's largest entry; -9 clips it to improve the others."""
CACHED = 1 << 17
"""Entries of a matrix per quantisation step, so that intermediates stay in the cache."""


class Integers(NamedTuple):
    """A matrix [N, D], or one per expert [E, N, D]: (integers - zero points) * scales + offsets."""

    number_ND: Tensor
    """Stored as int8, also for 4 and 6 bits; a backend's `pack` packs them."""
    scale: Tensor
    """float32 [N], for 8 bits without zero points; else [N, D / group], in 16 bits, or in float32 that
    packing rounds to 16 bits."""
    bits: int
    dtype: torch.dtype = torch.bfloat16
    """The dtype after dequantisation: the model's."""
    zero_NG: Tensor | None = None
    """Zero point of each group in int8; None: 0."""
    offset_NG: Tensor | None = None
    """Offset added to each weight of a group; None: 0."""
    group: int = GROUP
    """Inputs per scale: `GROUP`, or `HALF` without zero points and offsets."""

    @property
    def shape(self) -> torch.Size:
        return self.number_ND.shape

    @property
    def device(self) -> torch.device:
        return self.number_ND.device

    @property
    def by_group(self) -> bool:
        """True if there is a scale per group of inputs."""
        return self.scale.dim() == self.number_ND.dim()

    def expert(self, expert: int) -> "Integers":
        return self._each(lambda own: own[expert])

    def choose_rows(self, index_N: Tensor) -> "Integers":
        """Select outputs in the given order."""
        index_N = index_N.to(self.device)
        return self._each(lambda own: own[index_N])

    def is_like(self, other: "Integers") -> bool:
        """Return whether two matrices can be stacked."""
        return self._kind() == other._kind()

    def above(self, below: "Integers") -> "Integers | None":
        """Stack a matrix below this one; None if their kinds differ."""
        if not self.is_like(below):
            return None
        parts = below._tensors()
        return self._with(
            {name: torch.cat([tensor, parts[name]]) for name, tensor in self._tensors().items()}
        )

    def empty(self, shape: Sequence[int]) -> "Integers":
        """Allocate a matrix, or one per expert, of this kind."""
        rows, groups = tuple(shape[:-1]), -(-shape[-1] // self.group)
        sizes = {
            name: (*rows, shape[-1]) if name == "number_ND" else (*rows, groups) if self.by_group else rows
            for name in self._tensors()
        }
        return self._with({name: tensor.new_empty(sizes[name]) for name, tensor in self._tensors().items()})

    def place(self, part: "Integers", expert: int, first: int) -> None:
        """Write part of an expert's matrix, of the same kind, starting at row `first`."""
        parts = part._tensors()
        for name, tensor in self._tensors().items():
            tensor[expert, first : first + part.shape[0]] = parts[name]

    def wide(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantise in float32, a few rows at a time to stay in the cache."""
        out_ND = torch.empty(self.shape, dtype=dtype, device=self.device)
        rows = max(1, CACHED // self.shape[1])
        parts = {name: torch.split(tensor, rows) for name, tensor in self._tensors().items()}
        for i, rows_ND in enumerate(torch.split(out_ND, rows)):
            rows_ND.copy_(self._with({name: tensor[i] for name, tensor in parts.items()})._wide())
        return out_ND

    def _wide(self) -> Tensor:
        if not self.by_group:
            return self.number_ND * self.scale[:, None]
        number_NGI = _grouped(self.number_ND, self.group)
        if self.zero_NG is not None:
            number_NGI = number_NGI.short() - self.zero_NG[..., None]
        wide_NGI = number_NGI * self.scale.float()[..., None]
        if self.offset_NG is not None:
            wide_NGI += self.offset_NG.float()[..., None]
        return wide_NGI.flatten(1)[:, : self.shape[1]]

    def _spread(self, value_NG: Tensor) -> Tensor:
        """Expand per-group values to entries."""
        return value_NG.repeat_interleave(self.group, 1)[:, : self.shape[1]]

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._asdict().items() if isinstance(tensor, Tensor)}

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Integers":
        return self._with({name: change(tensor) for name, tensor in self._tensors().items()})

    def _with(self, tensors: dict[str, Any]) -> "Integers":
        return self._replace(**tensors)

    def _kind(self) -> tuple[object, ...]:
        return self.bits, self.dtype, self.group, self.scale.dtype, *self._tensors()


@dataclass(frozen=True)
class Rounding:
    """Quantises a matrix to integers of a given number of bits, rounding to nearest."""

    bits: int
    rounds_fp8: ClassVar[bool] = True
    """Requantise FP8 too: integers are smaller, and no CPU multiplies FP8."""

    @property
    def output(self) -> "Rounding":
        """Quantise the output matrix to 8 bits: it would cause most of the loss of 4 bits."""
        return INT8

    def quantise(self, weight: Tensor | Fp8 | Integers) -> Integers:
        """Quantise a matrix; experts one by one, since there is only memory for a few copies of one."""
        if len(weight.shape) == 2:
            wide_ND = weight.float() if isinstance(weight, Tensor) else weight.wide()
            number_ND, scale = (_to_int8 if self.bits == 8 else _to_int4)(wide_ND)
            return Integers(number_ND, scale, self.bits, weight.dtype)
        out = self.empty(weight.shape, weight.dtype, weight.device)
        for expert in range(weight.shape[0]):
            quantised = self.quantise(weight[expert] if isinstance(weight, Tensor) else weight.expert(expert))
            out.place(quantised, expert, 0)
        return out

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Integers:
        """Allocate a matrix, or one per expert."""
        *outputs, inputs = shape
        by_group, kind = ([-(-inputs // GROUP)], torch.float16) if self.bits == 4 else ([], torch.float32)
        number_ND = torch.empty(tuple(shape), dtype=torch.int8, device=device)
        scale = torch.empty((*outputs, *by_group), dtype=kind, device=device)
        return Integers(number_ND, scale, self.bits, dtype)

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix of this shape, including scales."""
        return num_bytes(shape, self.bits, by_group=self.bits == 4)


INT8 = Rounding(8)
INT4 = Rounding(4)


def num_bytes(shape: Sequence[int], bits: int, *, by_group: bool, pairs: bool = False) -> int:
    """Return the bytes of packed matrices; `pairs` counts two 16-bit values per group."""
    outputs, groups = prod(shape[:-1]), -(-shape[-1] // GROUP)
    return outputs * (groups * (GROUP * bits // 8 + (2 * by_group + 2 * pairs)) + (0 if by_group else 4))


def sixteen_bits(scale: Tensor) -> Tensor | None:
    """Return scales as float16, or else bfloat16, if that is exact; None otherwise."""
    if scale.dtype == torch.float16:
        return scale
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal((narrow := scale.to(dtype)).float(), scale.float()):
            return narrow
    return None


def round_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations to 8 bits in groups [T, G, 32], and return their scales [T, G].

    A group with a NaN or infinite entry has a NaN scale.
    """
    x_TGI = _grouped(x_TD.float())
    largest_TG = x_TGI.abs().amax(-1)
    largest_TG = torch.where(largest_TG < SMALLEST, 0.0, largest_TG)
    factor_TG = torch.where(largest_TG > 0, 127 / largest_TG, 0.0)
    number_TGI = (x_TGI * factor_TG[..., None]).nan_to_num(0).clamp(-127, 127).round()
    return number_TGI, largest_TG / 127 + (x_TGI * 0).sum(-1)


def multiply(x_TD: Tensor, matrix: Integers) -> Tensor:
    """Multiply quantised activations in float64, where every sum of integers is exact."""
    number_TGI, step_TG = round_rows(x_TD)
    x_TD = (number_TGI.double() * step_TG[..., None].double()).flatten(1)[:, : matrix.shape[1]]
    scale = matrix.scale.double()
    scale_ND = matrix._spread(scale) if matrix.by_group else scale[:, None]
    number_ND = matrix.number_ND.double()
    if matrix.zero_NG is not None:
        number_ND = number_ND - matrix._spread(matrix.zero_NG)
    weight_ND = number_ND * scale_ND
    if matrix.offset_NG is not None:
        weight_ND = weight_ND + matrix._spread(matrix.offset_NG.double())
    return x_TD @ weight_ND.T


def _grouped(x_ND: Tensor, group: int = GROUP) -> Tensor:
    """View columns in groups, padding the last with zeros."""
    missing = -x_ND.shape[1] % group
    return torch.nn.functional.pad(x_ND, (0, missing)).view(len(x_ND), -1, group)


def _to_int8(weight_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with each output's largest entry as the largest integer."""
    scale_N = weight_ND.abs().amax(1) / LARGEST
    scale_N = torch.where(scale_N > 0, scale_N, 1.0)
    return (weight_ND / scale_N[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale_N


def _to_int4(weight_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise group by group, a few rows at a time to stay in the cache."""
    weight_NGI = _grouped(weight_ND)
    number_NGI = torch.empty(weight_NGI.shape, dtype=torch.int8, device=weight_ND.device)
    scale_NG = weight_ND.new_empty(weight_NGI.shape[:2], dtype=torch.float16)
    rows = max(1, CACHED // weight_NGI[0].numel())
    parts = [torch.split(x, rows) for x in (weight_NGI, number_NGI, scale_NG)]
    for chunk_NGI, to_NGI, to_NG in zip(*parts, strict=True):
        fitted_NGI, fitted_NG = _fit_int4(chunk_NGI)
        to_NGI.copy_(fitted_NGI)
        to_NG.copy_(fitted_NG)
    return number_NGI.flatten(1)[:, : weight_ND.shape[1]].contiguous(), scale_NG


def _fit_int4(weight_NGI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best integers and scales over the candidate values of a group's largest entry."""
    largest_NG1 = weight_NGI.gather(2, weight_NGI.abs().argmax(2, keepdim=True))
    inverse_NG1 = torch.where(largest_NG1 != 0, 1 / largest_NG1, 0.0)
    best_NG = weight_NGI.new_full(weight_NGI.shape[:2], -1.0)
    number_NGI, candidate_NGI = torch.zeros_like(weight_NGI), torch.empty_like(weight_NGI)
    for largest in LARGEST_OF_4:
        torch.mul(weight_NGI, inverse_NG1 * largest, out=candidate_NGI)
        candidate_NGI.round_().clamp_(SMALLEST_OF_4, -SMALLEST_OF_4 - 1)
        found_NG = torch.linalg.vecdot(weight_NGI, candidate_NGI).square_()
        found_NG /= torch.linalg.vecdot(candidate_NGI, candidate_NGI).clamp_(min=1)
        better_NG = found_NG > best_NG
        best_NG = torch.where(better_NG, found_NG, best_NG)
        torch.where(better_NG[..., None], candidate_NGI, number_NGI, out=number_NGI)
    length_NG = torch.linalg.vecdot(number_NGI, number_NGI)
    scale_NG = torch.linalg.vecdot(weight_NGI, number_NGI) / length_NG.clamp(min=1)
    return number_NGI, torch.where(length_NG > 0, scale_NG, 1.0).half()
