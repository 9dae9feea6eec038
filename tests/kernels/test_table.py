"""Each implementation of an operation has the signature that `Kernels` declares."""

import inspect
from typing import Any, get_type_hints

import pytest

from specdec.kernels.table import OPERATIONS, PLACES, Kernels, load_kernels


def shape_of(function: Any) -> list[tuple[str, Any, Any]]:
    """Return the parameters' names, kinds and defaults."""
    parameters = inspect.signature(function).parameters.values()
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in parameters
        if parameter.name != "self"
    ]


@pytest.mark.parametrize("form", PLACES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_form_has_the_declared_signature(form: str, operation: str) -> None:
    if form in ("triton", "flashinfer"):
        pytest.importorskip("triton")
    found, declared = getattr(load_kernels(form), operation), getattr(Kernels, operation)
    assert shape_of(found) == shape_of(declared)
    own, wanted = get_type_hints(found), get_type_hints(declared)
    assert {name for name in wanted if wanted[name] is not Any and own[name] != wanted[name]} == set()


def test_flashinfer_multiplies_as_triton_does() -> None:
    pytest.importorskip("triton")
    own, triton = load_kernels("flashinfer"), load_kernels("triton")
    for name in ("pack", "linear", "pack_experts", "experts"):
        assert getattr(own, name) is getattr(triton, name)
