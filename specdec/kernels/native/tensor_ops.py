"""Torch's small operations as lists that C replays: a step's control logic between C kernels.

Only tensor values may differ between replays; shapes, types and strides are the recorded ones.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMES = (
    *("copy", "add", "sub", "mul", "div", "floor_divide", "remainder", "minimum", "maximum"),
    *("eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_not"),
    *("where", "gather", "scatter", "sum", "any", "sort"),
)
"""Operations, in the order of tensors.inc."""
TYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float64)
"""Dtypes, in the order of tensors.inc."""
MOST_DIMS = 8
BINARY = NAMES[1:18]
COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
WHOLE = ("floor_divide", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor")
"""Operations recorded for integers only."""
LARGE = 1 << 16
"""Entries above which torch computes faster than the lists; copies are equally fast."""
COPIES = ("copy", "gather", "scatter")

Writer = Callable[[Tensor], None]


class Unrecordable(Exception):
    """Raised for an operation that cannot be replayed."""


class TensorOps:
    """Encodes torch's operations as lists; `note` receives each list, `keep` the tensors it refers to."""

    def __init__(self, note: Writer, keep: Writer) -> None:
        self._note, self._keep = note, keep

    @classmethod
    def knows(cls, name: str) -> bool:
        """Return whether an operation, in place or not, can be recorded."""
        return name in BINARY or hasattr(cls, f"_do_{name}")

    def record(self, name: str, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Encode one operation, given its result.

        In place the result is the first argument, which is written last.
        """
        method = getattr(self, f"_do_{name}", None)
        if method is not None:
            method(result, *args, **kwargs)
        elif name in BINARY and not kwargs and len(args) == 2:
            self._binary(name, result, *args)
        else:
            raise Unrecordable(name)

    def _binary(self, name: str, out: Tensor, a: Any, b: Any) -> None:
        dtypes = [x.dtype for x in (a, b) if isinstance(x, Tensor)]
        numbers = [x for x in (a, b) if not isinstance(x, Tensor)]
        compares = name in COMPARES
        dtype = dtypes[0] if compares else out.dtype
        is_integer = not dtype.is_floating_point
        mixed = any(x != dtype for x in dtypes) or (is_integer and any(isinstance(x, float) for x in numbers))
        # torch rounds a scalar to bfloat16 before comparing, but not before multiplying.
        rounds = dtype == torch.bfloat16 and numbers and (compares or not isinstance(a, Tensor))
        if mixed or rounds or name in (("div",) if is_integer else WHOLE):
            raise Unrecordable(f"{name} of {dtypes} and {numbers}")
        self._write(name, out, self._operand(a, dtype), self._operand(b, dtype))

    def _do_rsub(self, out: Tensor, a: Tensor, b: Any) -> None:
        self._binary("sub", out, b, a)

    def _do_copy(self, out: Tensor, to: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        self._write("copy", out, source)

    def _do_fill(self, out: Tensor, to: Tensor, value: Any) -> None:
        self._write("copy", out, self._operand(value, out.dtype))

    def _do_zero(self, out: Tensor, to: Tensor) -> None:
        self._do_fill(out, to, 0)

    def _do_clone(self, out: Tensor, source: Tensor, **layout: Any) -> None:
        self._write("copy", out, source)

    def _do_to(self, out: Tensor, source: Tensor, *to: Any, **kwargs: Any) -> None:
        self._write("copy", out, source)

    _do__to_copy = _do_double = _do_float = _do_long = _do_bool = _do_contiguous = _do_to

    def _do_full(self, out: Tensor, size: Any, value: Any = 0, **to: Any) -> None:
        self._do_fill(out, out, value)

    def _do_full_like(self, out: Tensor, like: Tensor, value: Any, **to: Any) -> None:
        self._do_fill(out, out, value)

    def _do_zeros(self, out: Tensor, *like: Any, **to: Any) -> None:
        self._do_fill(out, out, 0)

    def _do_ones(self, out: Tensor, *like: Any, **to: Any) -> None:
        self._do_fill(out, out, 1)

    _do_zeros_like = _do_new_zeros = _do_zeros
    _do_ones_like = _do_new_ones = _do_ones

    def _do_clamp(self, out: Tensor, x: Tensor, min: Any = None, max: Any = None) -> None:
        for name, bound in (("maximum", min), ("minimum", max)):
            if bound is not None:
                self._write(name, out, x, self._operand(bound, out.dtype))
                x = out

    def _do_masked_fill(self, out: Tensor, x: Tensor, mask: Tensor, value: Any) -> None:
        self._write("where", out, mask, self._operand(value, out.dtype), x)

    def _do_where(self, out: Tensor, condition: Tensor, a: Any, b: Any) -> None:
        self._write("where", out, condition, self._operand(a, out.dtype), self._operand(b, out.dtype))

    def _do_bitwise_not(self, out: Tensor, x: Tensor) -> None:
        if out.dtype != torch.bool or x.dtype != torch.bool:
            raise Unrecordable("what is not of numbers")
        self._write("logical_not", out, x)

    _do_logical_not = _do_bitwise_not

    def _do_cat(self, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
        start = 0
        for part in parts:
            if part.ndim == out.ndim:  # torch skips empty one-dimensional parts
                self._write("copy", out.narrow(dim, start, part.shape[dim]), part)
                start += part.shape[dim]

    def _do_stack(self, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
        for i, part in enumerate(parts):
            self._write("copy", out.select(dim, i), part)

    def _do_constant_pad_nd(self, out: Tensor, x: Tensor, pad: Sequence[int], value: Any = 0) -> None:
        self._do_fill(out, out, value)
        inner = out
        for back, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
            if min(before, after) < 0:
                raise Unrecordable("a cut by padding")
            inner = inner.narrow(-1 - back, before, inner.shape[-1 - back] - before - after)
        self._write("copy", inner, x)

    def _do_flip(self, out: Tensor, x: Tensor, dims: Sequence[int]) -> None:
        flipped = {dim % x.ndim for dim in dims}
        strides = [-stride if dim in flipped else stride for dim, stride in enumerate(x.stride())]
        last = sum((x.shape[dim] - 1) * x.stride(dim) for dim in flipped)
        self._write("copy", out, _At(x, strides, last))

    def _do_gather(self, out: Tensor, x: Tensor, dim: int, index: Tensor) -> None:
        self._choose("gather", out, x, index, dim)

    def _do_scatter(self, out: Tensor, x: Tensor, dim: int, index: Tensor, source: Any) -> None:
        if out.data_ptr() != x.data_ptr():
            self._write("copy", out, x)
        source = self._operand(source, out.dtype)
        if source.ndim:
            source = source[tuple(map(slice, index.shape))]
        self._choose("scatter", out, source, index, dim)

    def _do_index_fill(self, out: Tensor, x: Tensor, dim: int, index: Tensor, value: Any) -> None:
        shape = [len(index) if i == dim % x.ndim else size for i, size in enumerate(x.shape)]
        placed = index.view([-1 if i == dim % x.ndim else 1 for i in range(x.ndim)]).expand(shape)
        self._do_scatter(out, x, dim, placed, value)

    def _do_sum(
        self, out: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> None:
        if x.dtype.is_floating_point or out.dtype != torch.int64:
            raise Unrecordable("a sum whose order counts")
        self._reduce("sum", out, x, dim, keepdim=keepdim)

    def _do_any(self, out: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False) -> None:
        self._reduce("any", out, x, dim, keepdim=keepdim)

    def _reduce(self, name: str, out: Tensor, x: Tensor, dim: Any, *, keepdim: bool) -> None:
        dims = [dim] if isinstance(dim, int) else dim
        if dims is None or [i % x.ndim for i in dims] != [x.ndim - 1]:
            raise Unrecordable(f"{name} over all but the last dimension")
        self._write(name, (out if keepdim else out.unsqueeze(-1)).expand_as(x), x)

    def _do_sort(
        self,
        out: Sequence[Tensor],
        x: Tensor,
        dim: int = -1,
        descending: bool = False,
        *,
        stable: bool | None = None,
    ) -> None:
        if dim % x.ndim != x.ndim - 1 or out[1].dtype != torch.int64:
            raise Unrecordable("sort along another dimension")
        self._write("sort", out[0], out[1], x, numbers=(int(descending),))

    def _choose(self, name: str, out: Tensor, source: Tensor, index: Tensor, dim: int) -> None:
        """Encode a gather from `source`, or a scatter into `out`."""
        dim %= index.ndim
        chosen = source if name == "gather" else out
        if index.dtype != torch.int64 or out.dtype != source.dtype:
            raise Unrecordable(f"{name} by {index.dtype}")
        strides = [0 if i == dim else stride for i, stride in enumerate(chosen.stride())]
        indexed = _At(chosen, strides)
        other = out if name == "gather" else source.expand(index.shape)
        operands = (other, indexed) if name == "gather" else (indexed, other)
        i = chosen.stride(dim), chosen.shape[dim]
        self._write(name, *operands, index, numbers=i, shape=index.shape)

    def _operand(self, x: Any, dtype: torch.dtype) -> Tensor:
        if isinstance(x, Tensor):
            return x
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        return torch.tensor(x, dtype=wide)

    def _write(
        self,
        name: str,
        out: "Tensor | _At",
        *given: "Tensor | _At",
        numbers: Sequence[int] = (),
        shape: Sequence[int] | None = None,
    ) -> None:
        """Encode one list; operands are expanded to the result's shape."""
        shape = out.shape if shape is None else shape
        if 0 in shape:
            return
        if name not in COPIES and math.prod(shape) > LARGE:
            raise Unrecordable(f"{name} of {math.prod(shape)} entries")
        operands = [_At.of(x, shape) for x in (out, *given)]
        if len(shape) > MOST_DIMS or any(operand.tensor.dtype not in TYPES for operand in operands):
            raise Unrecordable(f"{name} of {[operand.tensor.dtype for operand in operands]}")
        for operand in operands:
            self._keep(operand.tensor)
        words = [NAMES.index(name), max(len(shape), 1), *(shape or (1,)), len(operands)]
        for operand in operands:
            words += operand.address, TYPES.index(operand.tensor.dtype), *(operand.strides or (0,))
        self._note(torch.tensor([*words, *numbers], dtype=torch.int64))


class _At:
    """A tensor's memory with custom strides and offset."""

    def __init__(self, tensor: Tensor, strides: Sequence[int], first: int = 0) -> None:
        self.tensor, self.strides, self.shape = tensor, strides, tensor.shape
        self.address = tensor.data_ptr() + first * tensor.element_size()

    @classmethod
    def of(cls, x: "Tensor | _At", shape: Sequence[int]) -> "_At":
        """Expand a tensor to a shape; an `_At` is returned unchanged."""
        if isinstance(x, _At):
            return x
        return cls(x, x.expand(shape).stride())
