"""Where a model lies: told at once, before anything slow is imported or a port is taken."""

import os.path
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from specdec.errors import CheckpointError

SHIPPED: Mapping[str, Path] = MappingProxyType({"tiny": Path(__file__).parents[1] / "assets" / "tiny"})
"""Checkpoints that come with the package, by name; a folder of one's own that is called so is ./tiny."""

SHOWN = 240
"""Characters of a name in an error."""


def find_folder(model: str | Path) -> Path:
    """Return a model's folder, or say what to give instead."""
    if not isinstance(model, str | Path):
        raise CheckpointError(f"model: {model!r} is no path; give a folder", field="model")
    folder = SHIPPED.get(str(model), Path(model))
    if not os.path.isdir(folder):  # Path's own raises OSError for names that no file system takes
        raise CheckpointError(
            f"{short(folder)} is not a folder; give the path of a Hugging Face checkpoint "
            f"(hf download OWNER/NAME --local-dir FOLDER fetches one), or {' or '.join(SHIPPED)}, which "
            "ships with specdec",
            field="model",
        )
    return folder


def short(name: object) -> str:
    """Show a name that may have any length, on one line."""
    shown = " ".join(str(name).splitlines())
    return shown if len(shown) <= SHOWN else f"{shown[: SHOWN // 2]}…{shown[-SHOWN // 4 :]}"
