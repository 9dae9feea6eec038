"""Resolve a name to a folder of the hub's cache, downloading what is missing of the files that are read."""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import (
    HfApi,
    constants,
    errors,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)

from specdec.errors import CheckpointError
from specdec.models.files import DESCRIBING, HEAD_FOLDERS, INDEX, SINGLE, TEXT
from specdec.models.hub.failures import RAISED, cache_folder, check_endpoint, explain, no_room, size_of
from specdec.models.hub.names import HubName, is_commit, kept_as
from specdec.models.hub.transfer import FILES_AT_ONCE, Blob, Download

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHERS = (".safetensors", ".gguf", ".h5", ".msgpack")
SHOWN = 3
"""Files that an error names."""
_ETAG = re.compile(r"\w[\w.-]*", re.ASCII)


def find_snapshot(name: HubName) -> Path:
    """Return the folder of a model's files: those that the hub has now, or, out of reach, those cached."""
    repository = open_repository(name)
    if isinstance(repository, Path):
        return repository
    try:
        repository.fetch([*repository.described(), *repository.texts(), *repository.weights()])
        repository.keep_revision()
    except RAISED as error:
        raise explain(error, name) from error
    return repository.folder


def open_repository(name: HubName) -> "Repository | Path":
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
        kept = None if isinstance(error, errors.RevisionNotFoundError) else _cached(name)
        if kept is None:
            raise failure from error
        if not isinstance(error, errors.OfflineModeIsEnabled):
            logger.warning("taking %s as it is in the cache: %s", name, failure)
        return kept


@dataclass(frozen=True, slots=True)
class Repository:
    """A model on the hub at one commit."""

    name: HubName
    commit: str
    files: frozenset[str]

    @property
    def folder(self) -> Path:
        """Return where its files lie once they are fetched."""
        return kept_as(cache_folder(), self.name.repo) / "snapshots" / self.commit

    def described(self) -> list[str]:
        """List what says how its networks are made."""
        if "config.json" not in self.files:
            raise self._lacking(f"has no config.json, only {_few(self.files)}")
        heads = (f"{folder}/{file}" for folder in HEAD_FOLDERS for file in DESCRIBING)
        return [file for file in (*DESCRIBING, *heads) if file in self.files]

    def texts(self) -> list[str]:
        """List what makes tokens of texts."""
        return [file for file in TEXT if file in self.files]

    def weights(self) -> list[str]:
        """List the files of its tensors, those of a head in a folder of its own too; fetches indices."""
        found = self._weights("")
        if not found:
            raise self._without_weights()
        return found + [file for folder in HEAD_FOLDERS for file in self._weights(f"{folder}/")]

    def _weights(self, prefix: str) -> list[str]:
        single, index = f"{prefix}{SINGLE}", f"{prefix}{INDEX}"
        if single in self.files:
            return [single]
        if index not in self.files:
            return []
        self.fetch([index])
        shards = [f"{prefix}{shard}" for shard in read_shards(self.folder / index)]
        if absent := [shard for shard in shards if shard not in self.files]:
            raise self._lacking(f"lacks {_few(absent)}, which its {index} names")
        return [index, *shards]

    def _without_weights(self) -> CheckpointError:
        weights = [file for file in self.files if file.endswith(PICKLES + OTHERS)]
        if pickles := [file for file in weights if file.endswith(PICKLES)]:
            return self._lacking(f"has only pickle weights ({_few(pickles)}), which are not read")
        return self._lacking(f"has neither {SINGLE} nor {INDEX}, only {_few(weights or self.files)}")

    def _lacking(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name} {what}; name a repository with config.json and safetensors, as transformers "
            "writes them",
            field="model",
        )

    def fetch(self, files: Iterable[str]) -> None:
        """Download what the cache lacks of these files, once it is known to fit."""
        missing = [file for file in files if not (self.folder / file).is_file()]
        if not missing:
            return
        found = side_by_side(self.blob, missing)
        blobs = [blob for blob in found if blob and not blob.path.exists()]
        if blobs:
            cache, needed = cache_folder(), sum(blob.size - blob.received for blob in blobs)
            cache.mkdir(parents=True, exist_ok=True)
            if needed > (free := shutil.disk_usage(cache).free):
                raise no_room(self.name, needed, free)
            logger.info("downloading %s: %d files, %s, to %s", self.name, len(blobs), size_of(needed), cache)
            # What is too large for one HTTP answer is for huggingface_hub to download by other means.
            most = constants.MAX_HTTP_DOWNLOAD_SIZE
            Download(str(self.name), [blob for blob in blobs if blob.size <= most]).run()
        side_by_side(self._link, missing)

    def blob(self, file: str) -> Blob | None:
        """Ask for a file's size and id; None: no size is told, and huggingface_hub is to download it."""
        url = hf_hub_url(self.name.repo, file, revision=self.commit, endpoint=constants.ENDPOINT)
        found = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, retry_on_errors=True)
        if not found.etag or not _ETAG.fullmatch(found.etag):
            raise ValueError(f"the ETag of {file} is {found.etag!r}")
        if found.size is None:
            return None
        return Blob(url, found.size, kept_as(cache_folder(), self.name.repo) / "blobs" / found.etag)

    def _link(self, file: str) -> None:
        """Have a file's blob appear in the snapshot's folder."""
        hf_hub_download(self.name.repo, file, revision=self.commit)

    def keep_revision(self) -> None:
        """Note which commit a branch or tag stands for, for when the hub is out of reach: all is there."""
        if is_commit(self.name.revision):
            return
        ref = kept_as(cache_folder(), self.name.repo) / "refs" / self.name.revision
        if ref.is_file() and ref.read_text("utf-8") == self.commit:
            return
        with contextlib.suppress(OSError):  # a cache that is read-only serves all the same
            ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            fresh.write_text(self.commit, "utf-8")
            os.replace(fresh, ref)


def side_by_side(work: Callable[[T], R], each: Sequence[T]) -> list[R]:
    """Do what waits for the network for several things at once."""
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="specdec-hub") as pool:
        return list(pool.map(work, each))


def read_shards(index: Path) -> list[str]:
    """Return the files that an index names."""
    named = json.loads(index.read_text("utf-8"))["weight_map"].values()
    shards = sorted(set(named))
    if not shards or any(Path(shard).name != shard or not shard.endswith(".safetensors") for shard in shards):
        raise ValueError(f"{index.name} names {_few(shards)}, which are no safetensors beside it")
    return shards


def _cached(name: HubName) -> Path | None:
    """Return a snapshot that an earlier download left, if all of its weights are there."""
    config = try_to_load_from_cache(name.repo, "config.json", revision=name.revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    with contextlib.suppress(*RAISED):  # of an index that is damaged
        single = (folder / SINGLE).is_file()
        if single or all((folder / shard).is_file() for shard in read_shards(folder / INDEX)):
            return folder
    return None


def _few(files: Iterable[str]) -> str:
    shown = sorted(files)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"{', '.join(shown[:SHOWN]) or 'nothing'}{more}"
