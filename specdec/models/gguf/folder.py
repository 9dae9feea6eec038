"""A checkpoint folder for a GGUF file: its description and a link to the file."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.config.folders import descriptions
from specdec.errors import CheckpointError
from specdec.models.files import GGUF, GGUF_TYPES
from specdec.models.gguf.architectures import DescribedFile
from specdec.models.gguf.tensors import open_files, parts
from specdec.models.gguf.tokenizer import NONE, Vocabulary

REVISION = 7
"""Revision of the description. Folders of earlier revisions are deleted."""
_KEY = re.compile(r"(?:(\d+)-)?[0-9a-f]{16}")
"""Revision and hash; folders of the first revisions have only the hash."""
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def describe(path: Path, within: Path | None = None) -> Path:
    """Return a file's folder, written on first use to the user's cache or within another folder."""
    cache = within or descriptions()
    path = Path(os.path.abspath(path))  # keep links: in the hub's cache they have the file names
    try:
        found = [(str(part), (stat := part.stat()).st_size, stat.st_mtime_ns) for part in parts(path)]
        key = f"{REVISION}-{hashlib.sha256(repr(found).encode()).hexdigest()[:16]}"
        folder = cache / key / path.stem
        if folder.is_dir():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="draft-", dir=cache) as draft:
            (whole := Path(draft, key, path.stem)).mkdir(parents=True)
            _write(path, whole)
            try:
                os.replace(whole.parent, folder.parent)
            except OSError:  # another process may have written it
                if not folder.is_dir():
                    raise
        for old in cache.iterdir():
            if (other := _KEY.fullmatch(old.name)) and int(other[1] or 0) < REVISION:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the description of {path.name} to {cache} ({error}); make "
            "room, or set XDG_CACHE_HOME to a folder that can be written to",
            field="model",
        ) from error
    return folder


def _write(path: Path, folder: Path) -> None:
    file = open_files(path)
    sizes: Counter[str] = Counter()
    for entry in file.entries.values():
        sizes[entry.kind.name] += entry.bytes if len(entry.shape) > 1 else 0
    types = ", ".join(kind for kind, size in sizes.most_common() if size)
    described = DescribedFile(file)
    _json(folder / "config.json", {**described.config, GGUF_TYPES: types})
    (folder / GGUF).symlink_to(path)
    if described.fields.string("tokenizer.ggml.model", "no_vocab") in NONE:
        return
    vocabulary = Vocabulary(file)
    given = {name: file.metadata.get(f"general.sampling.{field}") for field, name in _SAMPLING.items()}
    sampling = {name: value for name, value in given.items() if type(value) in (int, float)}
    _json(folder / "generation_config.json", {"eos_token_id": vocabulary.endings(), **sampling})
    _json(folder / "tokenizer_config.json", vocabulary.config())
    vocabulary.tokenizer().save(str(folder / "tokenizer.json"))


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), "utf-8")
