"""Resolve a name to a folder of the hub's cache, downloading what is missing of the files that are read."""

import logging
from pathlib import Path

from huggingface_hub import HfApi, constants, errors

from specdec.models.hub.cached import find_begun, find_cached
from specdec.models.hub.failures import LOG_IN, RAISED, begun, check_endpoint, explain, in_part, refusal_of
from specdec.models.hub.names import HubName, is_commit
from specdec.models.hub.repository import Repository

logger = logging.getLogger(__name__)


def find_snapshot(name: HubName) -> Path:
    """Return the folder of a model's files: those that the hub has now, or, out of reach, those cached.

    Of GGUF files it is the model's file, or its first part.
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


def open_repository(name: HubName) -> Repository | Path:
    """Ask the hub what a name means now; where it does not say, return what is cached, if whole."""
    try:
        check_endpoint()
        info = HfApi().model_info(name.repo, revision=name.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        if not info.sha or not is_commit(info.sha):
            raise ValueError("it names no commit")
        files = frozenset(sibling.rfilename for sibling in info.siblings or ())
        return Repository(name, info.sha, files)
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
            logger.warning("taking %s as it is in the cache: %s", name, why)
        return kept.path
