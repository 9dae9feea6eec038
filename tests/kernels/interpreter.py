"""Triton's interpreter with correct bfloat16 and 8-bit floats, and float sums in a fixed order.

As shipped, it treats the bits of a bfloat16 as an integer, and sums in NumPy's order, which depends on the
processor, the shape, the memory layout and the row. Kernels promise that a token has the same bits in every
window. Here the order of a sum depends only on the number of its terms, so that a test of that promise tests
the kernel, not the machine's BLAS.

`install` must run before any kernel is defined; conftest does so without a GPU.
"""

import operator
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


def install() -> None:
    """Run kernels on CPU tensors from now on."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import ReduceOps, TensorHandle

    def is_narrow(handle: Any) -> bool:
        return bool(handle.dtype.scalar == tl.bfloat16)

    def widen(handle: Any) -> Any:
        return TensorHandle(_wide(handle.data), tl.float32) if is_narrow(handle) else handle

    compare = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
    binary, unary, total = Builder.binary_op, Builder.unary_op, ReduceOps.sum
    cast, to_float = Builder.cast_impl, Builder.create_fp_to_fp

    def create_dot(self: Any, a: Any, b: Any, added: Any, *_: Any) -> Any:
        kind = added.data.dtype
        product = dot(widen(a).data.astype(kind), widen(b).data.astype(kind))
        return TensorHandle(product + added.data, added.dtype.scalar)

    def sum_floats(self: Any, value: Any) -> Any:
        terms = value.handle.data
        if not np.issubdtype(terms.dtype, np.floating):
            return total(self, value)
        axes = range(terms.ndim) if self.axis is None else (self.axis,)
        for axis in axes:
            terms = np.expand_dims(fold(np.moveaxis(terms, axis, 0)), axis)
        return self.to_tensor(terms if self.keep_dims else np.squeeze(terms, tuple(axes)), value.dtype)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not is_narrow(left):
            return binary(self, left, right, op)
        result = op(_wide(left.data), _wide(right.data))
        return TensorHandle(result, tl.int1) if op in compare else TensorHandle(_narrow(result), tl.bfloat16)

    def unary_op(self: Any, value: Any, op: Any) -> Any:
        if not is_narrow(value):
            return unary(self, value, op)
        return TensorHandle(_narrow(op(_wide(value.data))), tl.bfloat16)

    def cast_impl(self: Any, value: Any, to: Any) -> Any:
        if to.scalar == tl.bfloat16 and value.dtype.scalar == tl.float32:
            return TensorHandle(_narrow(value.data), tl.bfloat16)
        if not is_narrow(value) or to.scalar == tl.bfloat16:
            return cast(self, value, to)
        return widen(value) if to.scalar == tl.float32 else cast(self, widen(value), to)

    def create_fp_to_fp(self: Any, value: Any, to: Any, rounding: Any) -> Any:
        if value.dtype.scalar == tl.float8e4nv:
            wide = TensorHandle(_wide_of_eight(value.data), tl.float32)
            return wide if to.scalar == tl.float32 else cast_impl(self, wide, to)
        if to.scalar == tl.float8e4nv:
            wide = value if value.dtype.scalar == tl.float32 else cast_impl(self, value, tl.float32)
            return TensorHandle(_eight(wide.data), tl.float8e4nv)
        if value.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16 and rounding is None:
            return TensorHandle(_narrow(value.data), tl.bfloat16)
        return to_float(self, value, to, rounding)

    def get_bf16(self: Any, value: float) -> Any:
        return TensorHandle(_narrow(np.array([value], np.float32)), tl.bfloat16)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # A number is an array of one entry here, which newer NumPy does not accept as an index.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch, interpreter._patch_lang_tensor = interpreter._patch_lang_tensor, patch_tensor
    Builder.create_dot, Builder.binary_op, Builder.unary_op = create_dot, binary_op, unary_op
    ReduceOps.sum = sum_floats
    Builder.cast_impl, Builder.create_fp_to_fp, Builder.get_bf16 = cast_impl, create_fp_to_fp, get_bf16
    # Patch the language's functions once: the interpreter would patch them all at each launch and each call
    # of a function from a kernel, which takes longer than the kernels.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
    _save_time(tl.core, interpreter)


def _save_time(core: Any, interpreter: Any) -> None:
    """Skip what the interpreter recomputes for every operation, which takes longer than the operation."""
    # A shape is a tuple of the language; computing its type for each one is slow, and nothing needs it.
    core._type_for_tuple_values = lambda values, fields=None: SimpleNamespace(fields=fields or [])
    # Overflow would be asserted in debug mode only, but is computed for each integer operation.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # NumPy's types are a dictionary made for each lookup.
    find_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def cached_dtype(kind: Any) -> Any:
        name = "pointer" if kind.scalar.is_ptr() else kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(kind)
        return dtypes[name]

    interpreter._get_np_dtype = cached_dtype
    # A block's type computes its name, and a tensor its shape in the language's numbers.
    shapes: dict[tuple[int, ...], tuple[Any, Any, Any]] = {(): ((), core.constexpr(1), core.tuple([]))}

    def make_block(self: Any, element: Any, shape: Any) -> None:
        sides = tuple(map(operator.index, shape))
        if sides not in shapes:
            numel = core.constexpr(core.validate_block_shape(sides))
            shapes[sides] = core.tuple(sides), numel, core.tuple([core.constexpr(side) for side in sides])
        self.element_ty, self.sides = element, sides
        self.shape, self.numel = shapes[sides][0], shapes[sides][1].value

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        _, self.numel, self.shape = shapes[kind.sides if kind.is_block() else ()]

    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    equal = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: (
        self is other
        or (
            equal(self, other)
            if isinstance(other, core.constexpr)
            else self.name == getattr(other, "name", None)
        )
    )


def dot(a: Any, b: Any) -> Any:
    """Multiply matrices: each product and each step of `fold` is rounded once."""
    columns, rows = np.moveaxis(a, -1, 0), np.moveaxis(b, -2, 0)
    return fold(np.multiply(columns[..., None], rows[..., None, :], order="C"))


def fold(terms: Any) -> Any:
    """Sum along the first axis, whose length is a power of two, by adding halves."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = terms[:half] + terms[half:]
    return terms[0]


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that entries a kernel omits are detected."""

    def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        size = shape[0] if isinstance(shape[0], tuple) else shape
        return torch.full(size, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", empty)


def _wide(bits: Any) -> Any:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def _narrow(values: Any) -> Any:
    wide = torch.from_numpy(np.ascontiguousarray(np.asarray(values, np.float32)))
    return wide.to(torch.bfloat16).view(torch.uint16).numpy()


def _wide_of_eight(bits: Any) -> Any:
    return torch.from_numpy(np.array(bits, np.uint8)).view(torch.float8_e4m3fn).float().numpy()


def _eight(values: Any) -> Any:
    wide = torch.from_numpy(np.array(values, np.float32))
    return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
