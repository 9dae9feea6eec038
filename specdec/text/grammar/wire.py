"""The protocol between the engine and a grammar's process: frames of jobs one way, of masks the other."""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

HEAD = struct.Struct("<I")
"""A frame's header: its length."""
COST = struct.Struct("<f")
"""Precedes the masks of an answer: the CPU seconds they took."""
FAILED, DONE = b"\x00", b"\x01"
"""First byte of the answer to a compile request."""

Path = tuple[int, ...]


class Kind(IntEnum):
    """The grammar's state after an output and a path of draft tokens."""

    BOUND = 0
    """Some tokens are allowed: a bit mask follows."""
    FREE = 1
    """Any token is allowed, as the path is unreachable."""
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
