"""Model folders: contents, cache locations, and how to restore a damaged one."""

import os
import re
from pathlib import Path

from specdec.errors import CheckpointError

_SNAPSHOT = re.compile(r"models--(.+?)--(.+)/snapshots/[0-9a-f]{40}")


def cache() -> Path:
    """Return the user's cache: `$XDG_CACHE_HOME/specdec`, or `~/.cache/specdec`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"


def random_models() -> Path:
    """Return the folder of random checkpoints."""
    return cache() / "random"


def descriptions() -> Path:
    """Return the folder of the model folders generated for GGUF files."""
    return cache() / "gguf"


def repo_of(folder: Path) -> str | None:
    """Return the OWNER/NAME on the Hugging Face hub of which a folder is a cached snapshot, or None."""
    match = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    return f"{match[1]}/{match[2]}" if match else None


def model_name(folder: Path) -> str:
    """Return a model's name: OWNER/NAME of a snapshot in the hub's cache, else the folder's name."""
    return repo_of(folder) or folder.name


def anew(folder: Path, otherwise: str = "download it again") -> str:
    """Return how to restore a damaged model; folders that specdec wrote or downloaded can be recreated."""
    if repo := repo_of(folder):
        return f"delete {folder.parents[1]}: {repo} will be downloaded again"
    if folder.resolve().parent.parent == descriptions().resolve():
        return f"delete {folder.parent}: it describes a GGUF file, and will be rewritten"
    if folder.resolve().parent == random_models().resolve():
        return f"delete {folder}: it is a random model, which the benchmarks will rewrite"
    return otherwise


def has_file(path: Path) -> bool:
    """Return whether a file exists; a folder of that name or a dangling link raises."""
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise CheckpointError(f"{path} is not a file, or a broken link; {anew(path.parent)}", field=path.name)
    return False
