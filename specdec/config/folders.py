"""Folders of models: which files one has, where random ones are kept, how a damaged one comes back."""

import os
from pathlib import Path

from specdec.errors import CheckpointError


def random_models() -> Path:
    """Return where random checkpoints are kept: `$XDG_CACHE_HOME/specdec/random`, or under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specdec" / "random"


def anew(folder: Path, otherwise: str = "download it again") -> str:
    """Say how a damaged model comes back whole: one that we wrote is written again."""
    if folder.resolve().parent == random_models().resolve():
        return f"delete {folder}: it is a random model, which the benchmarks write anew"
    return otherwise


def has_file(path: Path) -> bool:
    """Tell whether a model's folder has a file; a folder of that name, or a link to nothing, is an error."""
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise CheckpointError(
            f"{path} is no file, or a link to one that is not there; {anew(path.parent)}", field=path.name
        )
    return False
