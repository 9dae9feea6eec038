"""JSON that clients send, parsed so that other threads run meanwhile."""

import json
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from specdec.server.failures import Failure

SMALL = 1 << 16
"""Bytes that the parser in C takes in a few milliseconds, in which it lets no other thread run."""
MOST_VALUES = 1 << 20
"""Fields and elements of lists, all told: token ids of many long prompts."""
MOST_PARTS = 1 << 16
"""Objects, their fields, and lists of a body, all told."""


def parse(data: bytes) -> Any:
    """Parse a body, a large one in Python: others run between its values, and one too large ends early."""
    return json.loads(data) if len(data) <= SMALL else json.loads(data, cls=_Counting)


class _Counting(json.JSONDecoder):
    """Counts what it reads, and is good for one text."""

    def __init__(self) -> None:
        super().__init__(parse_int=_whole, parse_float=_broken)
        self.values = self.parts = 0
        self.parse_array, self.parse_object = self._array, self._object
        self._scan = self.scan_once = py_make_scanner(self)

    def _array(self, text_and_start: tuple[str, int], _: object) -> tuple[list[Any], int]:
        self._count_part()
        array: tuple[list[Any], int] = JSONArray(text_and_start, self._value)
        return array

    def _object(
        self, text_and_start: tuple[str, int], strict: bool, _: object, *named: Any
    ) -> tuple[dict[str, Any], int]:
        self._count_part()
        found: tuple[dict[str, Any], int] = JSONObject(text_and_start, strict, self._field, *named)
        return found

    def _field(self, text: str, start: int) -> tuple[Any, int]:
        self._count_part()
        return self._value(text, start)

    def _value(self, text: str, start: int) -> tuple[Any, int]:
        self.values += 1
        if self.values > MOST_VALUES:
            raise Failure(400, f"the body has more than {MOST_VALUES:,} values; send fewer.")
        value: tuple[Any, int] = self._scan(text, start)
        return value

    def _count_part(self) -> None:
        self.parts += 1
        check_parts(self.parts)


def _whole(digits: str) -> int:
    """Read a number; digits of other scripts, which the scanner in Python takes, are a `ValueError`."""
    return int(digits.encode("ascii"))


def _broken(digits: str) -> float:
    return float(digits.encode("ascii"))


def check_parts(parts: int) -> None:
    if parts > MOST_PARTS:
        raise Failure(400, f"the body has more than {MOST_PARTS:,} objects, fields and lists; send fewer.")
