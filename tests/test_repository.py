"""The repository's public face: links at the root, public names, a single version."""

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

import specdec
from specdec import errors
from tools.readme_plot import PLOT, draw

ROOT = Path(__file__).parents[1]
LINKS = ("draft", "verify", "state_slots", "kernels", "bench")


@pytest.mark.parametrize("name", LINKS)
def test_root_link_leads_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("specdec", name)
    assert (link / "__init__.py").is_file()


def test_kernels_package_is_empty() -> None:
    # transformers looks for a package of this name and, when run from the root, finds the link.
    assert (ROOT / "kernels" / "__init__.py").read_text("utf-8") == ""


def test_public_names_are_these() -> None:
    assert " ".join(specdec.__all__) == (
        "CapacityError CheckpointError Completion ConfigError Delta EngineConfig EngineError RequestError "
        "RequestStats SamplingParams SpecEngine SpecdecError Structure ThinkingSpan"
    )
    for name in specdec.__all__:
        assert getattr(specdec, name).__name__ == name
        assert name in dir(specdec)
    with pytest.raises(AttributeError, match="nonsense"):
        specdec.nonsense  # type: ignore[attr-defined] # noqa: B018


def test_every_error_is_public() -> None:
    theirs = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert theirs <= set(specdec.__all__)


def test_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "specdec.__version__"}
    assert f"## {specdec.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_readmes_plot_is_drawn_by_the_tool() -> None:
    assert PLOT.read_text("utf-8") == draw(), "run python -m tools.readme_plot"
    assert f"docs/{PLOT.name}" in (ROOT / "README.md").read_text("utf-8")


def test_console_script_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    module, function = project["scripts"]["specdec"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_every_error_is_one_of_ours() -> None:
    tree = ast.parse((ROOT / "specdec" / "errors.py").read_text("utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    drawn = ast.get_docstring(tree) or ""
    for node in classes:
        assert node.name in drawn, f"{node.name} is missing from the tree drawn at the top of errors.py"
