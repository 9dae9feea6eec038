"""Every kernel supports the given strides or raises StrideError: none computes wrong results."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.conv import triton as conv_triton
from specdec.kernels.group import RecurrentMemory
from specdec.kernels.kv_cache import triton as kv_cache_triton
from specdec.kernels.native import call, recurrent
from specdec.kernels.native.compiled import compiled
from specdec.kernels.pending import triton as pending_triton
from specdec.kernels.recurrence import triton as recurrence_triton
from specdec.kernels.strides import StrideError, dense, outer_strides, window_stride
from specdec.state_slots import arena
from tests.kernels.problems import bench_of, problems
from tests.selection import only
from tools.kernels.bench import TOLERANCE
from tools.kernels.problems import Planned

needs_c = pytest.mark.skipif(not compiled(), reason="no C compiler")
FORMS = ["reference", "cpu", pytest.param("native", marks=needs_c), "triton"]
BY_ADDRESS = FORMS[2:]
"""Kernels that use raw addresses; the others use torch, which handles strides."""
RECURRENT = ("experts", "mamba", "selective")
ORDERS = {
    "heads outermost": (0, 3, 1, 2, 4),
    "tokens outermost": (0, 1, 2, 3, 4),
    "parts innermost": (0, 2, 3, 1, 4),
    "blocks within heads": (3, 0, 1, 2, 4),
}
"""The dimensions of pages [N, parts, tokens, J, D] in memory order."""

Relay = Callable[[Tensor], Tensor]
Views = Callable[..., tuple[Any, ...]]


def laid(order: tuple[int, ...]) -> Relay:
    """Return a function that makes zeros in another memory order, next to as much forbidden memory."""

    def relay(view: Tensor) -> Tensor:
        sizes = [view.shape[dim] for dim in order]
        whole = torch.full((sizes[0], 2, *sizes[1:]), torch.nan, dtype=view.dtype)
        own = whole[:, 1].permute(*(order.index(dim) for dim in range(view.ndim)))
        return own.zero_()

    return relay


def apart(view: Tensor) -> Tensor:
    """Return zeros of which no two are adjacent."""
    return torch.full((*view.shape, 2), torch.nan, dtype=view.dtype)[..., 0].zero_()


def relay_pages(monkeypatch: pytest.MonkeyPatch, relay: Relay) -> None:
    right: Views = arena.page_views
    monkeypatch.setattr(arena, "page_views", lambda *given: tuple(map(relay, right(*given))))


def relay_memory(monkeypatch: pytest.MonkeyPatch, field: str, relay: Relay) -> None:
    right: Views = arena.recurrent_views

    def views(*given: Any) -> tuple[RecurrentMemory, ...]:
        return tuple(own._replace(**{field: relay(getattr(own, field))}) for own in right(*given))

    monkeypatch.setattr(arena, "recurrent_views", views)


def of_pages(form: str) -> Iterator[Planned]:
    bench = bench_of(form, torch.device("cpu"), torch.float32)
    return (
        problem for problem in problems(bench, "experts") if problem.operation in ("self_attention", "move")
    )


def of_memory(form: str, name: str) -> Iterator[Planned]:
    bench = bench_of(form, torch.device("cpu"), torch.float32)
    return (problem for problem in problems(bench, name, batch=2, window=4) if problem.backing)


def outcome(problem: Planned) -> str:
    """Return whether an operation is right, wrong, or refuses its inputs."""
    try:
        error = problem.build().error()
    except StrideError:
        return "refused"
    return "right" if error < TOLERANCE[torch.float32] else "wrong"


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_pages_may_lie_in_any_order(
    form: str, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay_pages(monkeypatch, laid(order))
    assert [outcome(problem) for problem in of_pages(form)] == ["right"] * 2


@pytest.mark.parametrize("form", FORMS)
def test_page_order_does_not_change_the_result(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: only the addresses of keys differ."""
    found = []
    for order in ORDERS.values():
        with monkeypatch.context() as patch:
            relay_pages(patch, laid(order))
            found.append(next(of_pages(form)).build().calls[0]())
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("form", BY_ADDRESS)
def test_a_heads_entries_are_contiguous(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relay_pages(monkeypatch, apart)
    assert [outcome(problem) for problem in of_pages(form)] == ["refused"] * 2


def _as_tokens_outermost(x: Tensor, inner: int) -> tuple[int, ...]:
    """Return the strides of pages as if tokens were outermost within a block."""
    if x.ndim != 5 or inner != 1:
        return outer_strides(x, inner)
    _, _, tokens, heads, dim = x.shape
    return x.stride(0), tokens * heads * dim, heads * dim, dim


@pytest.mark.parametrize("form", BY_ADDRESS)
def test_a_kernel_that_ignores_page_strides_is_detected(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the layout assumed by default."""
    for module in (call, kv_cache_triton):
        monkeypatch.setattr(module, "outer_strides", _as_tokens_outermost)
    assert "wrong" in [outcome(problem) for problem in of_pages(form)]


@pytest.mark.parametrize("field", RecurrentMemory._fields)
@pytest.mark.parametrize("name", only({"mamba"}, RECURRENT))
@pytest.mark.parametrize("form", FORMS[1:])
def test_no_layer_misreads_strided_memory(
    form: str, name: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay_memory(monkeypatch, field, apart)
    outcomes = {f"{own.operation} {own.backing}": outcome(own) for own in of_memory(form, name)}
    assert "wrong" not in outcomes.values(), outcomes
    if form == "cpu":
        assert set(outcomes.values()) == {"right"}


@pytest.mark.parametrize("form", BY_ADDRESS)
def test_windows_with_inputs_outermost_are_refused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relay_memory(monkeypatch, "window_SIC", laid((0, 1, 2)))
    outcomes = {own.operation: outcome(own) for own in of_memory(form, "experts")}
    assert {"delta_net", "causal_conv", "path_conv"} <= {
        operation for operation, found in outcomes.items() if found == "refused"
    }
    assert "wrong" not in outcomes.values(), outcomes


def _unchecked_outer(x: Tensor, inner: int) -> tuple[int, ...]:
    return x.stride()[: x.ndim - inner]


def _unchecked_window(window_SIC: Tensor) -> int:
    return window_SIC.stride(0)


@pytest.mark.parametrize("field", RecurrentMemory._fields)
@pytest.mark.parametrize("form", only({"native"}, BY_ADDRESS))
def test_a_kernel_that_does_not_check_memory_is_detected(
    form: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: outer strides are used, but inner dimensions are assumed dense."""
    relay_memory(monkeypatch, field, apart)
    for module in (call, recurrent, conv_triton, pending_triton, recurrence_triton):
        monkeypatch.setattr(module, "outer_strides", _unchecked_outer, raising=False)
        monkeypatch.setattr(module, "window_stride", _unchecked_window, raising=False)
    assert "wrong" in [outcome(problem) for problem in of_memory(form, "experts")]


def test_outer_strides_are_those_before_dense_dimensions() -> None:
    x = torch.empty(4, 3, 6)[:, :, :5]
    assert outer_strides(x, 1) == (18, 6) and outer_strides(x[:, :1], 2) == (18,)
    assert outer_strides(x[:, :0], 2) == (18,)
    with pytest.raises(StrideError, match=r"\(4, 3, 5\) has strides \(18, 6, 1\).*last 2 dimensions"):
        outer_strides(x, 2)
    with pytest.raises(StrideError):
        dense(x)
    assert dense(x[0, 0]).shape == (5,) and dense(None) is None
    assert window_stride(torch.empty(4, 7, 3).mT) == 21
    with pytest.raises(StrideError):
        window_stride(torch.empty(4, 3, 7))


def test_c_forms_get_addresses_of_checked_tensors_alone() -> None:
    """And addresses of outputs, which they allocate themselves."""
    taken = {
        path.name: len(re.findall(r"\.data_ptr\(\)", path.read_text()))
        for path in Path(native.__file__).parent.glob("*.py")
    }
    assert {name for name, count in taken.items() if count} == {
        *("call.py", "gather.py", "linear.py", "recurrent.py"),
        *("tape.py", "tensor_ops.py"),
    }
    assert taken["gather.py"] == taken["linear.py"] == taken["recurrent.py"] == 1
