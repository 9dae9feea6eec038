"""The protocol of the engine and a grammar's process: frames of jobs one way, of masks the other."""

import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

HEAD = struct.Struct("<I")
"""A frame's header: its length."""
COST = struct.Struct("<f")
"""Before the places of an answer: the seconds of a processor that they have taken."""
CLOSED = -1
"""Instead of how many tokens an output has taken: it is over."""

FAILED, DONE = b"\x00", b"\x01"
"""What the answer to a form begins with."""

Path = tuple[int, ...]


class Kind(IntEnum):
    """What is known of a place, the output followed by a path of drafted tokens."""

    BOUND = 0
    """Some tokens may follow: the bits of a mask."""
    FREE = 1
    """The form does not go there, so that no choice will: any token may follow."""
    OVER = 2
    """The output has reached its end."""
    DEAD = 3
    """No token may follow, and the output may not end here."""


class Job(NamedTuple):
    """One output's part of a frame: the tokens that it has taken since the last one, and what it asks."""

    output: int
    taken: Sequence[int] | None
    """None: the output is over and can be forgotten."""
    paths: Sequence[Path] = ()


def framed(data: bytes) -> bytes:
    return HEAD.pack(len(data)) + data


def pack(jobs: Sequence[Job]) -> bytes:
    """Write jobs as a frame's content."""
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
    """Read what `pack` has written."""
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
