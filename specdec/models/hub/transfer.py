"""Concurrent, resumable downloads."""

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from huggingface_hub import constants, errors
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    WeakFileLock,
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.errors import CheckpointError
from specdec.models.hub.failures import HTTPError, without_user

if TYPE_CHECKING:
    from httpx2 import Response  # huggingface_hub 1 has httpx instead

logger = logging.getLogger(__name__)

FILES_AT_ONCE = 8
CHUNK = 1 << 20
"""Bytes per hashing step."""
RETRIES = 5
"""Retries without progress; each waits twice as long as the one before."""
PROGRESS = 1 << 14
"""Bytes that count as progress."""
SLOW_S = 30.0
"""Time limit for `PROGRESS` bytes: a slower connection is closed and counts as broken."""
FIRST_PAUSE_S = 1.0
PASSING = {408, 429, 500, 502, 503, 504}
"""HTTP statuses that are retried."""
PARTIAL_CONTENT = 206
LOCK_S = 1.0
"""Delay between attempts to lock a file that another process is downloading."""
LARGE = 1 << 20
"""Minimum bytes of a download with a progress bar."""
LOG_S = 10.0
"""Delay between log lines if stderr is not a terminal and has no bar."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of a repository: its address and its path in the cache."""

    url: str
    size: int
    path: Path
    """Named by the hub's ETag, which for large files is their SHA-256."""

    @property
    def partial(self) -> Path:
        """Return the path of a partial download, which `hf cache prune` recognises."""
        return self.path.with_name(f"{self.path.name}.incomplete")

    @property
    def lock(self) -> Path:
        """Return the lock file of a download, the same as huggingface_hub's."""
        cache, repo = self.path.parents[2], self.path.parents[1].name
        return cache / ".locks" / repo / f"{self.path.name}.lock"

    @property
    def received(self) -> int:
        """Return its number of downloaded bytes."""
        if self.path.exists():
            return self.size
        return min(self.partial.stat().st_size, self.size) if self.partial.exists() else 0


@contextlib.contextmanager
def open_stream(url: str, span: str | None) -> "Iterator[Response]":
    """Request a file, or a range of its bytes, which a server may ignore."""
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if span is not None:
        headers["Range"] = f"bytes={span}"
    timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout_s) as response:
        hf_raise_for_status(response)
        yield response


def first_byte(response: "Response") -> int | None:
    """Return the file offset of a response; None if it is not stated."""
    if response.status_code != PARTIAL_CONTENT:
        return 0
    found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def read_stream(response: "Response") -> Iterator[bytes]:
    """Yield chunks as they arrive, so bytes received before a broken connection are not lost."""
    begun_s, received = time.monotonic(), 0
    for chunk in response.iter_bytes():
        yield chunk
        received += len(chunk)
        if received >= PROGRESS:
            begun_s, received = time.monotonic(), 0
        elif time.monotonic() - begun_s > SLOW_S:
            raise HTTPError(f"too slow: {received:,} bytes came in {SLOW_S:g} s")


class Stopped(Exception):
    """Raised in a thread whose download is cancelled."""


class Download:
    """Downloads blobs concurrently with a progress bar. A failure, or Ctrl-C, cancels all."""

    def __init__(self, title: str, blobs: Sequence[Blob]) -> None:
        self._title, self._blobs = title, {blob.path: blob for blob in blobs}.values()
        self._total = sum(blob.size for blob in self._blobs)
        self._shown = {blob.path: blob.received for blob in self._blobs}
        self._received = sum(self._shown.values())
        hidden = constants.HF_HUB_DISABLE_PROGRESS_BARS or self._total < LARGE
        self._bar = tqdm(
            total=self._total,
            initial=self._received,
            desc=f"Downloading {title}",
            unit="B",
            unit_scale=True,
            disable=True if hidden else None,
        )
        self._logged_s = time.monotonic()
        self._counting, self._stop = threading.Lock(), threading.Event()

    def run(self) -> None:
        """Download all blobs; block until complete."""
        pool = ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="specdec-download")
        try:
            futures = [pool.submit(self._fetch, blob) for blob in self._blobs]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            # A thread that waits for the network ends at its next response.
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            self._bar.close()

    def _fetch(self, blob: Blob) -> None:
        with self._locked(blob):
            if blob.path.exists():  # by another process
                return self._count(blob.size - self._shown[blob.path])
            with blob.partial.open("ab", buffering=0) as file:
                partial = _Partial(blob, file)
                self._count(partial.size - self._shown[blob.path])
                self._fill(partial)
                partial.check()
            os.replace(blob.partial, blob.path)
        return None

    @contextlib.contextmanager
    def _locked(self, blob: Blob) -> Iterator[None]:
        blob.lock.parent.mkdir(parents=True, exist_ok=True)
        blob.path.parent.mkdir(parents=True, exist_ok=True)
        told = False
        with contextlib.ExitStack() as held:
            while True:
                self._check()
                try:
                    held.enter_context(WeakFileLock(blob.lock, timeout=LOCK_S))
                    break
                except TimeoutError:
                    if not told:
                        logger.warning("another process downloads %s: waiting for it", without_user(blob.url))
                    told = True
            yield

    def _fill(self, partial: "_Partial") -> None:
        """Receive the missing bytes, reconnecting as needed."""
        wanted, most, failures = partial.blob.size, partial.size, 0
        while partial.size != wanted:
            failed = None
            try:
                self._receive(partial)
            except HTTPError as error:
                if isinstance(error, errors.HfHubHTTPError) and error.response.status_code not in PASSING:
                    raise
                failed = error
            failures = 0 if partial.size - most >= min(PROGRESS, wanted - most) else failures + 1
            most = max(most, partial.size)
            if failures > RETRIES:
                raise failed or partial.damage(f"ends after {partial.size:,} of {wanted:,} bytes")
            if failures:
                why = failed or f"it has {partial.size:,} of {wanted:,} bytes"
                logger.info(without_user(f"{partial.blob.url}: trying again ({why})"))
                self._stop.wait(FIRST_PAUSE_S * 2 ** (failures - 1))

    def _receive(self, partial: "_Partial") -> None:
        """Receive bytes until the connection ends."""
        with open_stream(partial.blob.url, f"{partial.size}-" if partial.size else None) as response:
            first = first_byte(response)
            if first != partial.size:
                self._count(-partial.size)
                partial.restart()
                if first != 0:
                    return  # not the requested range: request the whole file next
            for chunk in read_stream(response):
                self._check()
                partial.append(chunk)
                self._count(len(chunk))

    def _check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self._received += num_bytes
            self._bar.update(num_bytes)
            now_s = time.monotonic()
            if self._bar.disable and now_s - self._logged_s >= LOG_S:
                self._logged_s = now_s
                share = self._received / self._total
                logger.info(
                    "downloading %s: %.0f%% of %s bytes", self._title, 100 * share, f"{self._total:,}"
                )


class _Partial:
    """A partial blob, and its running SHA-256 if the hub states one."""

    def __init__(self, blob: Blob, file: BinaryIO) -> None:
        self.blob, self._file = blob, file
        self.size = blob.partial.stat().st_size
        self._hash = hashlib.sha256() if _SHA256.fullmatch(blob.path.name) else None
        if self.size > blob.size:
            self.restart()
        elif self._hash:
            with blob.partial.open("rb") as held:
                while chunk := held.read(CHUNK):
                    self._hash.update(chunk)

    def append(self, chunk: bytes) -> None:
        """Append received bytes."""
        if self.size + len(chunk) > self.blob.size:
            raise self.damage(f"goes on after its {self.blob.size:,} bytes")
        self._file.write(chunk)
        self.size += len(chunk)
        if self._hash:
            self._hash.update(chunk)

    def restart(self) -> None:
        """Discard received bytes: the server sends everything again."""
        self._file.truncate(0)
        self.size = 0
        self._hash = hashlib.sha256() if self._hash else None

    def check(self) -> None:
        """Check the SHA-256; discard the bytes and raise an error on a mismatch."""
        if self._hash and self._hash.hexdigest() != self.blob.path.name:
            self.restart()
            raise self.damage("does not have the SHA-256 that the hub promises")

    def damage(self, what: str) -> CheckpointError:
        """Return the error for received bytes that are not the file's."""
        return CheckpointError(
            f"what came from {without_user(self.blob.url)} {what}; run this again, and look for a proxy or a "
            "mirror that changes files",
            field="model",
        )
