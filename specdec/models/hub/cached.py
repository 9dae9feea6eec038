"""Fall back to the hub's cache if the hub is unavailable: complete snapshots and interrupted downloads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from specdec.models.files import HEAD_FOLDERS, INDEX, SINGLE
from specdec.models.gguf.names import parts, tagged
from specdec.models.hub.failures import RAISED, cache_folder
from specdec.models.hub.names import HubName, is_commit, kept_as
from specdec.models.hub.repository import Repository, read_shards


class Cached(NamedTuple):
    """A snapshot, and the needed files that it lacks."""

    path: Path
    """Its folder, or the selected GGUF file."""
    lacks: list[str]


def find_cached(name: HubName) -> Cached | None:
    """Return the snapshot of a name at its last download, by any program."""
    kept = kept_as(cache_folder(), name.repo)
    ref = kept / "refs" / name.revision
    commit = ref.read_text("utf-8").strip() if ref.is_file() else name.revision
    folder = kept / "snapshots" / commit
    if not is_commit(commit) or not folder.is_dir():
        return None
    found = frozenset(_files(folder))
    if name.tag or {SINGLE, INDEX}.isdisjoint(found):
        if file := tagged(found, name.tag):
            return Cached(folder / file, [part for part in parts(file) if part not in found])
        if name.tag:
            return None
    files = _listed(kept / "trees" / f"{commit}.json") or frozenset(_implied(folder))
    repository = Repository(name, commit, files)
    indices = [f"{prefix}{INDEX}" for prefix in _prefixes() if f"{prefix}{INDEX}" in files]
    wanted = [*repository.described(), *repository.texts(), *indices]
    if lacks := repository.missing(wanted):
        return Cached(folder, lacks)
    try:
        return Cached(folder, repository.missing(repository.weights()))
    except RAISED:
        return Cached(folder, [f"a {INDEX} that can be read"])


def find_begun(name: HubName) -> Path | None:
    """Return the folder of a download that was interrupted before its snapshot was complete."""
    kept = kept_as(cache_folder(), name.repo)
    blobs = kept / "blobs"
    is_begun = any(blobs.glob("*.incomplete")) or (any(blobs.glob("*")) and not (kept / "snapshots").is_dir())
    return kept if is_begun else None


def _listed(tree: Path) -> frozenset[str]:
    """Return a commit's files as noted by huggingface_hub; empty if it has not."""
    try:
        return frozenset(json.loads(tree.read_text("utf-8"))["files"])
    except RAISED:
        return frozenset()


def _implied(folder: Path) -> Iterator[str]:
    """Yield the files of a snapshot and their dependencies."""
    found = set(_files(folder))
    yield from found | {"config.json"}
    if "tokenizer_config.json" in found:
        yield "tokenizer.json"
    for prefix in _prefixes():
        if f"{prefix}{INDEX}" in found:
            try:
                yield from (f"{prefix}{shard}" for shard in read_shards(folder / prefix / INDEX))
            except RAISED:
                continue  # reported when it is loaded
        elif not prefix or f"{prefix}config.json" in found:
            yield f"{prefix}{SINGLE}"


def _files(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _prefixes() -> list[str]:
    return ["", *(f"{folder}/" for folder in HEAD_FOLDERS)]
