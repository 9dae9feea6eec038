"""A model on the hub at one commit: its needed files, and their download into the cache."""

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

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

from specdec.errors import CheckpointError
from specdec.models.files import DESCRIBING, HEAD_FOLDERS, INDEX, SINGLE, TEXT
from specdec.models.gguf.names import parts, tagged, tags
from specdec.models.hub.failures import cache_folder, few, no_room, size_of
from specdec.models.hub.names import HubName, is_commit, kept_as
from specdec.models.hub.transfer import FILES_AT_ONCE, Blob, Download

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

WEIGHTS = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHERS = (WEIGHTS, ".gguf", ".h5", ".msgpack")
MOST_TEXT_BYTES = 100_000_000
"""Maximum bytes of a file that is parsed in memory, which takes about ten times as much; tokenizers have 35
MB."""
_ETAG = re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Repository:
    """A model on the hub at one commit."""

    name: HubName
    commit: str
    files: frozenset[str]

    @property
    def folder(self) -> Path:
        """Return its snapshot folder."""
        return kept_as(cache_folder(), self.name.repo) / "snapshots" / self.commit

    def gguf(self) -> list[str]:
        """Return the named model's GGUF files, with all parts; empty: the name refers to a checkpoint."""
        if self.name.tag is None and not {SINGLE, INDEX}.isdisjoint(self.files):
            return []
        file = tagged(self.files, self.name.tag)
        if file is None and self.name.tag:
            known = ", ".join(tags(self.files))
            raise CheckpointError(
                f"{self.name.repo} has no GGUF file {self.name.tag}; "
                + (f"of its files give one of {known}" if known else "it has none at all"),
                field="model",
            )
        if file and (absent := [part for part in parts(file) if part not in self.files]):
            raise self._lacking(f"lacks {few(absent)}")
        return parts(file) if file else []

    def described(self) -> list[str]:
        """Return the files that describe its networks."""
        if "config.json" not in self.files:
            raise self._lacking(f"has no config.json, only {few(self.files)}")
        heads = (f"{folder}/{file}" for folder in HEAD_FOLDERS for file in DESCRIBING)
        return [file for file in (*DESCRIBING, *heads) if file in self.files]

    def texts(self) -> list[str]:
        """Return the tokenizer's files."""
        return [file for file in TEXT if file in self.files]

    def weights(self) -> list[str]:
        """Return its weight files, including a draft head's; fetches indices."""
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
            raise self._lacking(f"lacks {few(absent)}, which its {index} names")
        return [index, *shards]

    def _without_weights(self) -> CheckpointError:
        weights = [file for file in self.files if file.endswith(PICKLES + OTHERS)]
        if pickles := [file for file in weights if file.endswith(PICKLES)]:
            return self._lacking(f"has only pickle weights ({few(pickles)}), which are not read")
        return self._lacking(f"has neither {SINGLE} nor {INDEX}, only {few(weights or self.files)}")

    def _lacking(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name} {what}; name a repository with config.json and safetensors, as transformers "
            "writes them",
            field="model",
        )

    def missing(self, wanted: Iterable[str]) -> list[str]:
        """Return the files that the cache lacks."""
        return [file for file in wanted if not (self.folder / file).is_file()]

    def fetch(self, wanted: Iterable[str]) -> None:
        """Download the files that the cache lacks, after checking disk space."""
        missing = self.missing(wanted)
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
            # huggingface_hub downloads files that are too large for one HTTP response by other means.
            most = constants.MAX_HTTP_DOWNLOAD_SIZE
            Download(str(self.name), [blob for blob in blobs if blob.size <= most]).run()
        # Weights last: if they are complete, so is the rest, even after an interruption.
        last = [file for file in missing if file.endswith(WEIGHTS) and "/" not in file]
        for files in ([file for file in missing if file not in last], last):
            side_by_side(self._link, files)

    def url(self, file: str) -> str:
        """Return a file's address."""
        return hf_hub_url(self.name.repo, file, revision=self.commit, endpoint=constants.ENDPOINT)

    def blob(self, file: str) -> Blob | None:
        """Fetch a file's size and id; None: the size is unknown, and huggingface_hub must download it."""
        url = self.url(file)
        found = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, retry_on_errors=True)
        if not found.etag or not _ETAG.fullmatch(found.etag):
            raise ValueError(f"the ETag of {file} is {found.etag!r}")
        if found.commit_hash != self.commit:
            raise ValueError(f"it has {file} of commit {found.commit_hash!r}, not of {self.commit}")
        if not file.endswith(OTHERS) and (found.size or 0) > MOST_TEXT_BYTES:
            raise ValueError(f"{file} has {size_of(found.size or 0)}, more than {MOST_TEXT_BYTES:,}")
        if found.size is None:
            return None
        return Blob(url, found.size, kept_as(cache_folder(), self.name.repo) / "blobs" / found.etag)

    def _link(self, file: str) -> None:
        hf_hub_download(self.name.repo, file, revision=self.commit)

    def keep_revision(self) -> None:
        """Store the commit of a branch or tag for offline use; call once everything is downloaded."""
        if is_commit(self.name.revision):
            return
        ref = kept_as(cache_folder(), self.name.repo) / "refs" / self.name.revision
        if ref.is_file() and ref.read_text("utf-8") == self.commit:
            return
        with contextlib.suppress(OSError):  # a read-only cache still works
            ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            fresh.write_text(self.commit, "utf-8")
            os.replace(fresh, ref)


def side_by_side(work: Callable[[T], R], each: Sequence[T]) -> list[R]:
    """Map a network-bound function over items concurrently."""
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="specdec-hub") as pool:
        return list(pool.map(work, each))


def read_shards(index: Path) -> list[str]:
    """Return the shards that an index names."""
    named = json.loads(index.read_text("utf-8"))["weight_map"].values()
    shards = sorted(set(named))
    if not shards or any(Path(shard).name != shard or not shard.endswith(WEIGHTS) for shard in shards):
        raise ValueError(f"{index.name} names {few(shards)}, which are not safetensors in its folder")
    return shards
