"""Who may import whom. Read from the sources, so that imports inside functions count like any other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "specdec"
LINKS = ("draft", "verify", "state_slots", "kernels", "bench", "server")

PARTS = {"kernels", "state_slots", "models", "draft", "verify"}
CORE = {"engine", "worker", "loop", "scheduler", "request", "outputs", "text"}
CORE |= {"build", "config", "resolve", "options", "footprint", "capabilities", "counts", "parts"}
CORE |= {"asked", "records"}
CORE |= {"speculation", "warmup", "streak", "chat", "settings", "structure", "forms", "grammars"}
CORE |= {"prefixes", "precompile", "devices", "sampling", "prompts", "tenant", "terms"}
PUBLIC = {PACKAGE}
"""The package itself: what `from specdec import SpecEngine` names."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "tenant": set(),
    "charts": set(),
    "kernels": set(),
    "state_slots": {"kernels", "tenant"},
    "models": {"kernels", "state_slots"},
    "draft": {"kernels", "state_slots", "tenant"},
    # How a token is chosen is what a request's parameters say; sampling itself imports nothing that computes.
    "verify": {"kernels", "state_slots", "sampling"},
    **{name: PARTS | CORE for name in CORE},
    "options": {"settings", "parser"},
    "settings": set(),
    "config": {"settings"},
    "sampling": {"settings", "structure"},
    "structure": {"settings", "forms"},
    "forms": set(),
    "chat": {"models"},
    PACKAGE: CORE,
    "bench": PARTS | CORE | PUBLIC | {"charts"},
    # Training needs nothing that serves but the settings of devices and shapes.
    "train": PARTS | CORE | PUBLIC | {"charts"},
    "server": CORE | PUBLIC | {"models", "state_slots"},
    # The command line starts servers, benchmarks and training; nothing else may know them.
    # A command is imported once it is chosen, and all end where the process does.
    "cli": PUBLIC | {"parser", "commands", "bench", "train", "server", "__main__"},
    "commands": CORE | PUBLIC | {"parser", "models", "bench", "terminal", "demo", "top"},
    "parser": set(),
    "terminal": CORE | PUBLIC,
    "demo": CORE | PUBLIC | {"terminal"},
    "top": {"terminal"},
    "__main__": {"cli"},
}
"""What each part may import beside itself and `errors`."""


def part_of(module: str) -> str:
    """Return the part of the package that a module's dotted name belongs to."""
    return module.split(".")[1] if "." in module else module


def imported(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Yield the dotted name of everything of ours that a source imports, wherever in it."""
    anchor = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                start = anchor[: len(anchor) - node.level + 1] if node.level else []
                name = ".".join([*start, *filter(None, [node.module])])
                # `from specdec import engine` names a part, `from specdec.engine import x` does so already.
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


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """List the imports of a source that its place in the house forbids."""
    part, found = part_of(module), []
    if part not in MAY_IMPORT:
        return [f"{module}: the part {part!r} has no row in the table of tests/test_imports.py"]
    allowed = MAY_IMPORT[part] | {part, "errors"}
    for name in imported(source, module, is_package=is_package):
        first = name.split(".")[0]
        if first in LINKS:
            found.append(f"{module} imports {name}: say {PACKAGE}.{name}, a link at the root is no package")
        elif first == PACKAGE:
            target = part_of(name)
            target = target if target in MAY_IMPORT or (ROOT / PACKAGE / target).is_dir() else PACKAGE
            if target not in allowed:
                found.append(f"{module} imports {name}: {part} may import {sorted(allowed)}")
    return found


def modules() -> list[tuple[str, Path]]:
    """List every module of the package with its file."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


@pytest.mark.parametrize(("module", "path"), [pytest.param(*m, id=m[0]) for m in modules()])
def test_imports_stay_within_the_rule(module: str, path: Path) -> None:
    found = violations(path.read_text("utf-8"), module, is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specdec.kernels.conv.cpu", "from specdec.state_slots.tree import TokenTree"),
        ("specdec.kernels.conv.cpu", "import specdec.models.spec as spec"),
        ("specdec.kernels.conv.cpu", "def f():\n    from specdec.engine import SpecEngine"),
        ("specdec.kernels.conv.cpu", "from ...models import spec"),
        ("specdec.kernels.conv.cpu", "from ... import models"),
        ("specdec.kernels.conv.cpu", "from specdec import SpecEngine"),
        ("specdec.state_slots.arena", "if TYPE_CHECKING:\n    from specdec.request import Request"),
        ("specdec.state_slots.arena", "import specdec"),
        ("specdec.models.network", "from specdec import draft"),
        ("specdec.draft.mtp", "from specdec.models.network import Network"),
        ("specdec.verify.walk", "from specdec.draft.ngram import propose"),
        ("specdec.verify.walk", "import importlib\nimportlib.import_module('specdec.models.spec')"),
        ("specdec.verify.walk", "from importlib import import_module\nimport_module(f'specdec.models.{x}')"),
        ("specdec.verify.choose", "from specdec.request import Request"),
        ("specdec.config", "from specdec.kernels.table import load_kernels"),
        ("specdec.engine", "from specdec.bench.report import table"),
        ("specdec.engine", "from specdec import cli"),
        ("specdec.errors", "from specdec.kernels.group import Group"),
        ("specdec.charts.lines", "from specdec.bench.report import table"),
        ("specdec.bench.throughput", "from specdec.cli import main"),
        ("specdec.engine", "from kernels.group import Group"),
        ("specdec.engine", "import state_slots.arena"),
        ("specdec.engine", "from specdec.terminal import visible"),
        ("specdec.__main__", "from specdec.engine import SpecEngine"),
        ("specdec.novelty", "import json"),
    ],
)
def test_imports_against_the_rule_are_caught(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specdec.kernels.table", "import importlib\nimportlib.import_module(f'specdec.kernels.{x}.cpu')"),
        ("specdec.kernels.conv.cpu", "import torch\nfrom .reference import causal_conv"),
        ("specdec.state_slots.arena", "from specdec.errors import CapacityError"),
        ("specdec.models.network", "from specdec.state_slots.window import Window"),
        ("specdec.loop", "from specdec.verify.choose import choose"),
        ("specdec", "from specdec.engine import SpecEngine"),
        ("specdec.commands", "from specdec import SpecEngine"),
    ],
)
def test_imports_within_the_rule_pass(module: str, source: str) -> None:
    is_package = module == "specdec"
    assert violations(source, module, is_package=is_package) == []
