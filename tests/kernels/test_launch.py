"""With programmatic launches a kernel may start early: each must wait before it accesses memory."""

import ast
from pathlib import Path

import pytest

import specdec.kernels

MODULES = sorted(
    path
    for path in Path(specdec.kernels.__file__).parent.rglob("*.py")
    if "import triton" in path.read_text("utf-8") and path.name != "launch.py"
)


def decorator(function: ast.FunctionDef) -> str:
    """Return the name of a function's decorator, called or not."""
    for own in function.decorator_list:
        found = own.func if isinstance(own, ast.Call) else own
        return ast.unparse(found)
    return ""


def first_statement(function: ast.FunctionDef) -> str:
    """Return a function's first statement after its docstring."""
    return ast.unparse(function.body[ast.get_docstring(function) is not None])


def faults(source: str) -> list[str]:
    """Return the kernels launched with a grid that do not wait first, or lack the `kernel` decorator."""
    tree = ast.parse(source)
    functions = {own.name: own for own in ast.walk(tree) if isinstance(own, ast.FunctionDef)}
    launched = {
        own.func.value.id
        for own in ast.walk(tree)
        if isinstance(own, ast.Call)
        and isinstance(own.func, ast.Subscript)
        and isinstance(own.func.value, ast.Name)
        and own.func.value.id in functions
    }
    kernels = {name for name, own in functions.items() if decorator(own) == "kernel"}
    waits = {name for name in kernels if first_statement(functions[name]) == "overlap()"}
    return sorted((launched | kernels) - waits)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_launched_kernel_waits_first(path: Path) -> None:
    assert faults(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "@triton.jit\ndef f(x):\n    overlap()\nf[(1,)](x)",
        "@kernel\ndef f(x):\n    tl.store(x, 1)",
        "@kernel(do_not_specialize=['x'])\ndef f(x):\n    tl.load(x)\n    overlap()",
    ],
)
def test_a_kernel_without_a_wait_is_found(source: str) -> None:
    assert faults(source) == ["f"]
