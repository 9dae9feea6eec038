"""`specdec` with injectable engine faults: `python -m tests.server.faulty serve …`.

Writing a place's name into the file named by FAULT makes the next step that passes there fail, after part of
its work. The file is deleted when this happens.
"""

import ctypes
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from specdec.cli import main
from specdec.core.acceptance_stats import AcceptanceStats
from specdec.core.loop import DecodeLoop
from specdec.core.scheduler import Scheduler
from specdec.core.speculation import Speculation
from specdec.draft.lookup import LookupDrafter
from specdec.engine.engine import SpecEngine
from specdec.models.frame import LoadedHalfLayer
from specdec.server import run
from specdec.server.resident import Resident
from specdec.state_slots.backing import RecordBacking
from specdec.state_slots.slots import SlotPool
from specdec.text.grammar import compiler
from specdec.text.grammar.template import Template

PLACES: dict[str, tuple[type, str]] = {
    "planned": (Scheduler, "schedule"),
    "drafted": (Speculation, "draft"),
    "looked up": (LookupDrafter, "propose"),
    "inside the network": (LoadedHalfLayer, "run"),
    "chosen": (DecodeLoop, "_choose"),
    "committed in part": (RecordBacking, "promote"),
    "learnt": (AcceptanceStats, "learn"),
    "said in part": (DecodeLoop, "_emit"),
    "ended": (Speculation, "end"),
    "inside the arena": (SlotPool, "_file"),
}
"""Places in a step, with the function that raises after its work."""
FILE = "FAULT"
PATIENCE_S = 8.0
"""Compile timeout here: several times what a grammar takes on an idle machine."""


def told(place: str, file: Path) -> bool:
    """Return whether a place should fail now, and delete the file if so."""
    try:
        if file.read_text("utf-8") != place:
            return False
    except FileNotFoundError:
        return False
    file.unlink()
    return True


def set_trap(owner: type | ModuleType, name: str, place: str, file: Path) -> None:
    """Make a function raise after its work if its place is named."""
    right = getattr(owner, name)

    def wrong(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        if told(place, file):
            raise RuntimeError(f"told to fail: {place}")
        return result

    setattr(owner, name, wrong)


def set_worse(file: Path) -> None:
    """Make whole steps run out of memory, hang, hold the GIL, or end the engine's thread."""
    right = DecodeLoop.step

    def wrong(loop: DecodeLoop) -> None:
        right(loop)
        if told("no memory", file):
            raise torch.OutOfMemoryError("told to fail")
        if told("hang", file):
            time.sleep(1000)
        if told("hold", file):
            ctypes.PyDLL(None).sleep(1000)
        if told("stop", file):
            raise SystemExit("told to fail")

    DecodeLoop.step = wrong  # type: ignore[method-assign]


def set_held_loads(file: Path) -> None:
    """Make reloading a model wait while the file says so."""
    right = Resident.build

    def held(own: Resident) -> SpecEngine:
        while own.max_model_len and file.exists() and file.read_text("utf-8") == "load":
            time.sleep(0.01)
        return right(own)

    Resident.build = held  # type: ignore[method-assign]


def set_slow_grammars() -> None:
    """Compile grammars in processes that can be told to hang; wait less for them."""
    compiler.PATIENCE_S = PATIENCE_S
    right = Template.__init__

    def wrong(template: Template, *arguments: Any) -> None:
        right(template, *arguments)
        template.command = [sys.executable, "-m", "tests.server.slow_grammars"]

    Template.__init__ = wrong  # type: ignore[method-assign]


if __name__ == "__main__":
    trap = Path(os.environ[FILE])
    for name, (owner, function) in PLACES.items():
        set_trap(owner, function, name, trap)
    set_trap(run, "_abandon_hung", "watched", trap)
    set_worse(trap)
    set_held_loads(trap)
    set_slow_grammars()
    sys.exit(main())
