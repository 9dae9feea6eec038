"""Describe a model on the hub without its weights, from its files' headers."""

import os
import shutil
from pathlib import Path

from specdec.errors import CheckpointError
from specdec.models.files import INDEX
from specdec.models.hub.failures import RAISED, explain
from specdec.models.hub.names import HubName, kept_as
from specdec.models.hub.repository import Repository, side_by_side
from specdec.models.hub.snapshot import open_repository
from specdec.models.hub.transfer import first_byte, open_stream, read_stream

FIRST = 1 << 17
"""Bytes of the first request, which cover most headers."""
FIRST_GGUF = 1 << 23
"""The same for GGUF files, whose headers contain vocabularies."""
DIVISORS = "rope_freqs.weight"
"""The tensor of a GGUF file that scales positions."""
LONGEST = 100_000_000
"""Maximum bytes of a header, as in safetensors."""


def find_headers(name: HubName, scratch: Path) -> Path:
    """Return a model's cached snapshot, else a folder in `scratch` that describes it.

    Weight files there have their header and full length, with a hole for the tensors, which takes no disk
    space and reads as zeros. For GGUF files the first part is returned.
    """
    repository = open_repository(name)
    if isinstance(repository, Path):
        return repository
    folder = kept_as(scratch, name.repo) / "snapshots" / repository.commit
    try:
        if gguf := repository.gguf():
            if not repository.missing(gguf):
                return repository.folder / gguf[0]
            (folder / gguf[0]).parent.mkdir(parents=True, exist_ok=True)
            side_by_side(lambda file: _dig_gguf(repository.url(file), folder / file), gguf)
            return folder / gguf[0]
        weights = repository.weights()
        if not repository.missing([*repository.described(), *weights]):
            return repository.folder
        return _describe(repository, weights, folder)
    except RAISED as error:
        raise explain(error, name) from error


def _describe(repository: Repository, weights: list[str], folder: Path) -> Path:
    whole = repository.described() + [file for file in weights if file.endswith(INDEX)]
    repository.fetch(whole)
    for file in (*whole, *weights):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
    for file in whole:
        shutil.copyfile(repository.folder / file, folder / file)

    def dig(file: str) -> None:
        header, size = _header(repository.url(file))
        with (folder / file).open("wb") as hollow:
            hollow.write(header)
            hollow.truncate(size)

    side_by_side(dig, [file for file in weights if file not in whole])
    return folder


def _dig_gguf(url: str, path: Path) -> None:
    """Write a GGUF file's header, whose length is only known once parsed, and the position scaling tensor."""
    # Imported late: only GGUF files need it.
    from specdec.models.gguf.file import GgufFile, TruncatedError
    from specdec.models.gguf.metadata import MOST_ROTATED

    count = FIRST_GGUF
    while True:
        start, size = _start(url, count)
        path.write_bytes(start)
        try:
            GgufFile(path)
        except TruncatedError:
            if len(start) < size:
                if count > LONGEST:  # past these bytes the file is a hole that could be parsed for hours
                    raise ValueError(f"{url} has a header of more than {LONGEST:,} bytes") from None
                count *= 4
                continue
        except CheckpointError:
            pass  # the header is complete; other faults are raised below, where the file has its full size
        break
    os.truncate(path, size)
    entries = GgufFile(path).entries
    entry = entries.get(DIVISORS)
    if entry and entry.bytes <= 2 * MOST_ROTATED:  # larger ones are refused by their shape
        with open_stream(url, f"{entry.offset}-{entry.offset + entry.bytes - 1}") as response:
            if first_byte(response) != entry.offset:
                raise ValueError(f"{url} returned another byte range than requested")
            with path.open("r+b") as hollow:
                hollow.seek(entry.offset)
                hollow.writelines(read_stream(response))


def _header(url: str) -> tuple[bytes, int]:
    """Return a safetensors file's header, with its length prefix, and the file's size."""
    start, size = _start(url, FIRST)
    end = 8 + int.from_bytes(start[:8], "little")
    if not 8 < end <= min(LONGEST, size):
        raise ValueError(f"{url} is no safetensors file")
    if end > len(start):
        start, size = _start(url, end)
    return start[:end], size


def _start(url: str, count: int) -> tuple[bytes, int]:
    """Return a file's first bytes and its size."""
    with open_stream(url, f"0-{count - 1}") as response:
        if first_byte(response) != 0:
            raise ValueError(f"{url} returned another byte range than requested")
        whole = (
            response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers["Content-Length"]
        )
        start = bytearray()
        for chunk in read_stream(response):
            start += chunk
            if len(start) >= count:  # a server without range support sends everything
                break
        return bytes(start[:count]), int(whole)
