"""Parse clients' JSON without blocking other threads."""

import json
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from specdec.server.failures import Failure

SMALL = 1 << 16
"""Bytes that the C parser handles in a few milliseconds, while no other thread can run."""
MOST_VALUES = 1 << 20
"""Maximum fields and list elements of a body: enough for the token ids of many long prompts."""
MOST_PARTS = 1 << 16
"""Maximum objects, fields and lists of a body."""


def parse(data: bytes) -> Any:
    """Parse a body; a large one in Python, which lets other threads run and stops early at the limits."""
    return json.loads(data) if len(data) <= SMALL else json.loads(data, cls=_Counting)


class _Counting(json.JSONDecoder):
    """Decoder that counts values and parts; used once."""

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
        self, text_and_start: tuple[str, int], strict: bool, _: object, *args: Any
    ) -> tuple[dict[str, Any], int]:
        self._count_part()
        result: tuple[dict[str, Any], int] = JSONObject(text_and_start, strict, self._field, *args)
        return result

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
    """Parse an integer; non-ASCII digits, which the Python scanner accepts, raise `ValueError`."""
    return int(digits.encode("ascii"))


def _broken(digits: str) -> float:
    return float(digits.encode("ascii"))


def check_parts(parts: int) -> None:
    if parts > MOST_PARTS:
        raise Failure(400, f"the body has more than {MOST_PARTS:,} objects, fields and lists; send fewer.")
