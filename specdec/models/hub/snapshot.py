"""Resolve a name to a folder of the hub's cache, downloading missing files."""

import json
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants, errors

from specdec.models.hub.cached import find_begun, find_cached
from specdec.models.hub.failures import LOG_IN, RAISED, begun, check_endpoint, explain, in_part, refusal_of
from specdec.models.hub.names import HubName, is_commit
from specdec.models.hub.repository import Repository
from specdec.models.hub.transfer import open_stream, read_stream

logger = logging.getLogger(__name__)

MOST_INFO_BYTES = 64 << 20
"""Maximum bytes of a repository's description, about 100 bytes per file. huggingface_hub would read an
endless response until memory is full."""


def find_snapshot(name: HubName) -> Path:
    """Return the folder of a model's files: current ones, or cached ones if the hub is unreachable.

    For GGUF it is the model's file, or its first part.
    """
    repository = open_repository(name)
    if isinstance(repository, Path):
        return repository
    try:
        gguf = repository.gguf()
        repository.fetch(gguf or [*repository.described(), *repository.texts(), *repository.weights()])
        repository.keep_revision()
    except RAISED as error:
        raise explain(error, name) from error
    return repository.folder / gguf[0] if gguf else repository.folder


def _is_inside(file: str) -> bool:
    """Return whether a file's name is a path below a folder."""
    return not {"", ".", ".."} & set(file.split("/")) and not any(sign in file for sign in "\\\0")


def open_repository(name: HubName) -> Repository | Path:
    """Resolve a name on the hub; if the hub does not answer, return the cached folder if complete."""
    try:
        check_endpoint()
        info = _describe(name)
        if not is_commit(info["sha"]):
            raise ValueError("it names no commit")
        files = frozenset(file["rfilename"] for file in info["siblings"])
        if any(not _is_inside(file) for file in files):
            raise ValueError("it names files outside the repository")
        return Repository(name, info["sha"], files)
    except RAISED as error:
        failure = explain(error, name)
        kept = None if isinstance(error, errors.RevisionNotFoundError) else find_cached(name)
        refusal = refusal_of(error)
        if kept is None:
            is_away = not refusal and not isinstance(error, errors.RevisionNotFoundError)
            if is_away and (folder := find_begun(name)):
                raise begun(name, folder, error) from error
            raise failure from error
        if kept.lacks:
            raise in_part(name, kept.path, kept.lacks, error) from error
        if not isinstance(error, errors.OfflineModeIsEnabled):
            why = f"{refusal}; {LOG_IN} where it is private" if refusal else failure
            logger.warning("using the cached copy of %s: %s", name, why)
        return kept.path


def _describe(name: HubName) -> dict[str, Any]:
    """Fetch a repository's commit and files."""
    url = f"{constants.ENDPOINT}/api/models/{name.repo}/revision/{quote(name.revision, safe='')}"
    data = bytearray()
    with open_stream(url, None) as response:
        for chunk in read_stream(response):
            data += chunk
            if len(data) > MOST_INFO_BYTES:
                raise ValueError(f"it says more than {MOST_INFO_BYTES:,} bytes of {name}")
    info: dict[str, Any] = json.loads(data)
    return info
