"""The folder that a GGUF file stands for: its description as a checkpoint's, beside a link to the file."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.config.folders import cache
from specdec.errors import CheckpointError
from specdec.models.files import GGUF
from specdec.models.gguf.architectures import Described
from specdec.models.gguf.tensors import open_files
from specdec.models.gguf.tokenizer import NONE, Vocabulary

REVISION = 1
"""Of what is written here: folders of another revision are written anew."""
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def describe(path: Path) -> Path:
    """Return the folder of a file, written to the user's cache the first time."""
    path = path.resolve()
    found = path.stat()
    recipe = f"{REVISION} {path} {found.st_size} {found.st_mtime_ns}"
    folder = cache() / "gguf" / hashlib.sha256(recipe.encode()).hexdigest()[:16] / path.stem
    if folder.is_dir():
        return folder
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=folder.parent.parent))
    except OSError as error:
        raise CheckpointError(
            f"what is read of {path.name} is kept in {folder.parent.parent}, which cannot be written to "
            f"({error.strerror}); set XDG_CACHE_HOME to a folder that can",
            field="model",
        ) from None
    try:
        (draft / path.stem).mkdir()
        _write(path, draft / path.stem)
        if not folder.is_dir():
            os.replace(draft, folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(path: Path, folder: Path) -> None:
    file, *others = open_files(path)
    for other in others:
        file.entries.update(other.entries)
    _json(folder / "config.json", Described(file).config)
    (folder / GGUF).symlink_to(path)
    if file.metadata.get("tokenizer.ggml.model") in NONE:
        return
    vocabulary = Vocabulary(file)
    given = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    sampling = {name: value for name, value in given.items() if value is not None}
    _json(folder / "generation_config.json", {"eos_token_id": vocabulary.endings(), **sampling})
    _json(folder / "tokenizer_config.json", vocabulary.config())
    vocabulary.tokenizer().save(str(folder / "tokenizer.json"))


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), "utf-8")
