"""The package's imports, parsed from its sources, so that imports inside functions count."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "specdec"


def part_of(module: str) -> str:
    """Return the subpackage of a module's dotted name."""
    return module.split(".")[1] if "." in module else module


@cache
def imported(source: str, module: str, *, is_package: bool) -> tuple[str, ...]:
    """Return the dotted names that a source imports from this package, at any level."""
    return tuple(_imported(source, module, is_package=is_package))


def _imported(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    anchor = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                start = anchor[: len(anchor) - node.level + 1] if node.level else []
                name = ".".join([*start, *filter(None, [node.module])])
                # `from specdec import engine` names a subpackage, `from specdec.engine import x` does so
                # already.
                yield from (f"{name}.{alias.name}" for alias in node.names)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _is_dynamic_import(node.func):
                yield name
            case ast.Call(args=[ast.JoinedStr(values=[ast.Constant(value=str(name)), *_]), *_]) if (
                _is_dynamic_import(node.func)
            ):
                yield f"{name}*"


def _is_dynamic_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def modules() -> list[tuple[str, Path]]:
    """Return every module of the package with its file."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts).removesuffix(".__init__"), path))
    return found
