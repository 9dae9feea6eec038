"""Import rules between subpackages, checked in the sources, so that imports inside functions count."""

import pytest

from tests import map as house
from tests.imports import PACKAGE, ROOT, imported, modules, part_of

LINKS = ("draft", "verify", "state_slots", "kernels", "bench", "server")

LOOSE = {"__init__.py", "__main__.py", "errors.py", "py.typed"}
"""Files beside the subpackages."""

PARTS = {"kernels", "state_slots", "models", "draft", "verify"}
BELOW_CORE = {"config", "text"} | PARTS
BELOW_SETUP = BELOW_CORE | {"core"}
BELOW_ENGINE = BELOW_SETUP | {"setup"}
ENGINE = BELOW_ENGINE | {"engine"}
FRONT = {"http", "reach", "bench", "server", "ray"}
PUBLIC = {PACKAGE}
"""The package itself, as in `from specdec import SpecEngine`."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "text": {"config"},
    "kernels": set(),
    "state_slots": {"config", "kernels"},
    "models": {"config", "kernels", "state_slots"},
    "draft": {"config", "kernels", "state_slots"},
    # Sampling is defined by a request's parameters.
    "verify": {"config", "kernels", "state_slots"},
    "http": set(),
    "core": BELOW_CORE,
    "setup": BELOW_SETUP,
    "engine": BELOW_ENGINE,
    "reach": ENGINE - {"kernels", "draft", "verify"} | PUBLIC | {"http"},
    PACKAGE: {"config", "core", "engine"},
    "bench": ENGINE | PUBLIC | {"http"},
    "server": ENGINE - {"kernels", "draft", "verify"} | PUBLIC | {"http", "reach"},
    # The ingress has no engine; it shares the servers' HTTP code, from the listening socket to errors.
    "ray": {"config", "http", "models", "server"},
    # The command line starts servers and benchmarks; no other part may import them. Commands are imported
    # when chosen.
    "cli": ENGINE - PARTS | PUBLIC | FRONT | {"models", "__main__"},
    "__main__": {"cli"},
}
"""What each subpackage may import beside itself and `errors`, from the lowest layer up."""


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return the forbidden imports of a source."""
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


def test_the_package_is_rooms_and_nothing_else() -> None:
    entries = [path for path in (ROOT / PACKAGE).iterdir() if path.name != "__pycache__"]
    assert {path.name for path in entries if not path.is_dir()} == LOOSE
    rooms = {path.name for path in entries if path.is_dir() and any(path.rglob("*.py"))}
    assert rooms == MAY_IMPORT.keys() - {PACKAGE, "errors", "__main__"}


def test_imports_stay_within_the_rule() -> None:
    found = [
        wrong
        for module, path in modules()
        for wrong in violations(path.read_text("utf-8"), module, is_package=path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specdec.kernels.conv.cpu", "from specdec.state_slots.tree import TokenTree"),
        ("specdec.kernels.conv.cpu", "import specdec.models.spec as spec"),
        ("specdec.kernels.conv.cpu", "def f():\n    from specdec.engine.engine import SpecEngine"),
        ("specdec.kernels.conv.cpu", "from ...models import spec"),
        ("specdec.kernels.conv.cpu", "from ... import models"),
        ("specdec.kernels.conv.cpu", "from specdec import SpecEngine"),
        ("specdec.state_slots.arena", "if TYPE_CHECKING:\n    from specdec.core.request import Request"),
        ("specdec.state_slots.arena", "import specdec"),
        ("specdec.models.network", "from specdec import draft"),
        ("specdec.draft.mtp", "from specdec.models.network import Network"),
        ("specdec.verify.walk", "from specdec.draft.ngram import propose"),
        ("specdec.verify.walk", "import importlib\nimportlib.import_module('specdec.models.spec')"),
        ("specdec.verify.walk", "from importlib import import_module\nimport_module(f'specdec.models.{x}')"),
        ("specdec.verify.sampler", "from specdec.core.request import Request"),
        ("specdec.config.engine", "from specdec.kernels.table import load_kernels"),
        ("specdec.engine.engine", "from specdec.bench.report import table"),
        ("specdec.engine.engine", "from specdec import cli"),
        ("specdec.errors", "from specdec.kernels.group import Group"),
        ("specdec.config.base", "from specdec.text.tokenizer import Tokenizer"),
        ("specdec.text.tokenizer", "from specdec.models.checkpoint import few"),
        ("specdec.draft.policy", "from specdec.core.request import Request"),
        ("specdec.core.loop", "from specdec.setup.resolve import Resolved"),
        ("specdec.core.device.step", "from specdec.setup.build import build"),
        ("specdec.setup.build", "from specdec.engine.thread import Worker"),
        ("specdec.engine.engine", "from specdec.reach.carrier import Carrier"),
        ("specdec.reach.carrier_thread", "from specdec.server.app import make_app"),
        ("specdec.server.app", "from specdec.bench.report import table"),
        ("specdec.server.app", "from specdec.ray.spans import fields_of"),
        ("specdec.ray.run", "from specdec.engine.engine import SpecEngine"),
        ("specdec.bench.throughput", "from specdec.cli import main"),
        ("specdec.engine.engine", "from kernels.group import Group"),
        ("specdec.engine.engine", "import state_slots.arena"),
        ("specdec.engine.engine", "from specdec.cli.terminal import visible"),
        ("specdec.__main__", "from specdec.engine.engine import SpecEngine"),
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
        ("specdec.core.loop", "from specdec.verify.sampler import choose"),
        ("specdec.text.tokenizer", "from specdec.config.folders import anew"),
        ("specdec", "from specdec.engine.engine import SpecEngine"),
        ("specdec.cli.commands", "from specdec import SpecEngine"),
    ],
)
def test_imports_within_the_rule_pass(module: str, source: str) -> None:
    is_package = module == "specdec"
    assert violations(source, module, is_package=is_package) == []


def test_the_map_of_the_house_is_up_to_date() -> None:
    assert house.MAP.read_text("utf-8") == house.draw(house.arrows()), "make map draws it anew"


def test_every_arrow_of_the_map_points_down() -> None:
    found = house.arrows()
    floors = house.floors(found)
    assert floors.keys() == house.BOXES.keys()
    assert all(floors[upper] < floors[lower] for upper, lowers in found.items() for lower in lowers)


def test_the_layers_are_no_circle() -> None:
    house.floors({room: lowers - {"__main__"} for room, lowers in MAY_IMPORT.items()})


def test_a_circle_is_caught() -> None:
    with pytest.raises(ValueError, match="a cycle: "):
        house.floors({"a": {"b"}, "b": {"c", "a"}, "c": set()})
