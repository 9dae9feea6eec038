"""Find the byte spans of a JSON object's fields without reserialising it."""

import json
import re
from collections.abc import Mapping
from typing import Any

SPACE = re.compile(rb"[ \t\r\n]*")
SCALAR = re.compile(rb"[^\s,\]}\[{\":]+")
MARK = re.compile(rb'"[^"\\]{0,256}"|["{}\[\]]')
"""What ends or begins something within a value, or a short string."""
TEXT = re.compile(rb'(?:[^"\\]+|\\.)*', re.DOTALL)
"""What may stand in a string."""
MOST_FIELDS = 1024
"""Of a body; replicas know of some hundred."""
MOST_MARKS = 1 << 18
"""Maximum strings, objects and lists in a body's values; replicas accept fewer."""
PART = 1 << 16
"""Bytes of a string that are looked at in one go: a pattern lets nothing else run until it is done."""

Span = tuple[int, int]


def fields_of(body: bytes) -> dict[str, Span]:
    """Find the values of an object's fields, of equal ones the last.

    What is no object, or has more than MOST_FIELDS or MOST_MARKS, is a ValueError.

    Values are skipped, not read: who gets them finds their mistakes.
    """
    at = _after(body, 0, b"{")
    found: dict[str, Span] = {}
    if body[at:].strip() == b"}":
        return found
    left = MOST_MARKS
    for _ in range(MOST_FIELDS):
        if body[at : at + 1] != b'"':
            raise ValueError("a field's name is missing")
        name_end = _end_of_string(body, at)
        start = _after(body, name_end, b":")
        end, left = _end_of_value(body, start, left)
        found[json.loads(body[at:name_end])] = start, end
        at = _skip(body, end)
        if body[at : at + 1] == b"}":
            if _skip(body, at + 1) != len(body):
                raise ValueError("something follows the object")
            return found
        at = _after(body, at, b",")
    raise ValueError("there are too many fields")


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


def _end_of_value(body: bytes, at: int, left: int) -> tuple[int, int]:
    """Return where a value ends, and how many marks are left for those behind it."""
    sign = body[at : at + 1]
    if sign == b'"':
        return _end_of_string(body, at), left
    if sign not in (b"{", b"["):
        found = SCALAR.match(body, at)
        if found is None:
            raise ValueError("a value is missing")
        return found.end(), left
    depth = 0
    while True:
        for mark in MARK.finditer(body, at):
            sign, left = mark[0], left - 1
            if not left:
                raise ValueError("there is too much in it")
            if sign == b'"':
                at = _end_of_string(body, mark.start())
                break
            if sign[0] in b"{[":
                depth += 1
            elif sign[0] in b"}]":
                depth -= 1
                if not depth:
                    return mark.end(), left
        else:
            raise ValueError("a value does not end")


def _end_of_string(body: bytes, at: int) -> int:
    """Return what follows a string that begins here; a long one is looked through in parts."""
    at += 1
    while True:
        found = TEXT.match(body, at, at + PART)
        assert found, "the pattern takes nothing too"
        if body[found.end() : found.end() + 1] == b'"':
            return found.end() + 1
        if found.end() == at:
            raise ValueError("a string does not end")
        at = found.end()
