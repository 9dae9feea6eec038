"""The protocol between the engine and a grammar's process: frames of jobs one way, of masks the other."""

import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

HEAD = struct.Struct("<I")
"""A frame's header: its length."""
COST = struct.Struct("<f")
"""Precedes the masks of an answer: the CPU seconds they took."""
CLOSED = -1
"""In place of the number of accepted tokens: the output has finished."""

FAILED, DONE = b"\x00", b"\x01"
"""First byte of the answer to a compile request."""

Path = tuple[int, ...]


class Kind(IntEnum):
    """The grammar's state after an output and a path of draft tokens."""

    BOUND = 0
    """Some tokens are allowed: a bit mask follows."""
    FREE = 1
    """Any token is allowed, as the path is unreachable or the mask is all ones."""
    OVER = 2
    """The output is complete."""
    DEAD = 3
    """No token is allowed, and the output may not end here."""


class Job(NamedTuple):
    """One output's part of a frame: newly accepted tokens, and paths to compute masks for."""

    output: int
    taken: Sequence[int] | None
    """None: the output has finished and can be forgotten."""
    paths: Sequence[Path] = ()


def framed(data: bytes) -> bytes:
    return HEAD.pack(len(data)) + data


def pack(jobs: Sequence[Job]) -> bytes:
    """Serialise jobs as a frame's content."""
    ints = array("i")
    for output, taken, paths in jobs:
        ints.append(output)
        if taken is None:
            ints.append(CLOSED)
            continue
        ints.append(len(taken))
        ints.extend(taken)
        ints.append(len(paths))
        for path in paths:
            ints.append(len(path))
            ints.extend(path)
    return ints.tobytes()


def unpack(data: bytes) -> Iterator[Job]:
    """Parse the output of `pack`."""
    numbers = array("i")
    numbers.frombytes(data)
    ints, at = numbers.tolist(), 0
    while at < len(ints):
        output, count = ints[at : at + 2]
        at += 2
        if count == CLOSED:
            yield Job(output, None)
            continue
        taken = ints[at : at + count]
        at += count
        paths = []
        left = ints[at]
        at += 1
        for _ in range(left):
            length = ints[at]
            paths.append(tuple(ints[at + 1 : at + 1 + length]))
            at += 1 + length
        yield Job(output, taken, paths)
