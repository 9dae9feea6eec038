"""Look into a JSON object without making it anew: where its fields' values stand, byte for byte."""

import json
import re
from collections.abc import Mapping
from typing import Any

SPACE = re.compile(rb"[ \t\r\n]*")
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
SCALAR = re.compile(rb"[^\s,\]}\[{\":]+")
MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
"""What ends or begins something within a value; what a string holds is none of it."""

Span = tuple[int, int]


def fields_of(body: bytes) -> dict[str, Span]:
    """Find the values of an object's fields, of equal ones the last. What is no object is a ValueError.

    Values are skipped, not read: who gets them finds their mistakes.
    """
    at = _after(body, 0, b"{")
    found: dict[str, Span] = {}
    if body[at:].strip() == b"}":
        return found
    while True:
        name = STRING.match(body, at)
        if name is None:
            raise ValueError("a field's name is missing")
        start = _after(body, name.end(), b":")
        end = _end_of_value(body, start)
        found[json.loads(name[0])] = start, end
        at = _skip(body, end)
        if body[at : at + 1] == b"}":
            if _skip(body, at + 1) != len(body):
                raise ValueError("something follows the object")
            return found
        at = _after(body, at, b",")


def value_of(body: bytes, fields: Mapping[str, Span], name: str) -> Any:
    """Read one field; None if there is none."""
    if name not in fields:
        return None
    start, end = fields[name]
    return json.loads(body[start:end])


def with_fields(body: bytes, fields: Mapping[str, Span], changes: Mapping[str, bytes]) -> bytes:
    """Return the object with some values changed or added; every other byte is as it was."""
    inside = sorted((fields[name], value) for name, value in changes.items() if name in fields)
    added = [
        json.dumps(name).encode() + b":" + value for name, value in changes.items() if name not in fields
    ]
    parts, at = [], 0
    for (start, end), value in inside:
        parts += [body[at:start], value]
        at = end
    last = body.rindex(b"}")
    parts += [body[at:last], b"," if fields and added else b"", b",".join(added), body[last:]]
    return b"".join(parts)


def _skip(body: bytes, at: int) -> int:
    """Return where the white space here ends."""
    found = SPACE.match(body, at)
    assert found, "the pattern takes nothing too"
    return found.end()


def _after(body: bytes, at: int, sign: bytes) -> int:
    """Return what follows a sign and the white space around it."""
    at = _skip(body, at)
    if body[at : at + 1] != sign:
        raise ValueError(f"{sign.decode()} is missing")
    return _skip(body, at + 1)


def _end_of_value(body: bytes, at: int) -> int:
    if body[at : at + 1] not in (b"{", b"["):
        found = STRING.match(body, at) or SCALAR.match(body, at)
        if found is None:
            raise ValueError("a value is missing")
        return found.end()
    depth = 0
    for mark in MARK.finditer(body, at):
        sign = body[mark.start()]
        if sign in b"{[":
            depth += 1
        elif sign in b"}]":
            depth -= 1
            if not depth:
                return mark.end()
    raise ValueError("a value does not end")
