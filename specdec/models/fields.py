"""Typed access to a JSON config: every error names file, field, value and what is supported."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

from specdec.errors import CheckpointError

LARGEST = (1 << 31) - 1
"""Upper bound of any size; the product of two still fits 64-bit integers."""

TEXT = ("text_config", "llm_config")
"""Names of the language model's level in a multimodal config."""


class Fields:
    """One level of a config. Several names are spellings of one field; the first present wins.

    A null field counts as absent.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "", *, file: str = "config.json") -> None:
        self._values, self._where, self._file = values, where, file

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def null(self, name: str) -> bool:
        """Return whether the field is present and null, for fields where that differs from absence."""
        return name in self._values and self._values[name] is None

    def get(self, *names: str) -> Any:
        """Return the field's raw value, or None."""
        return next((self._values[name] for name in names if name in self), None)

    def refuse(self, name: str, supported: str) -> NoReturn:
        """Raise an error: this value of the field is unsupported."""
        path = f"{self._where}.{name}" if self._where else name
        problem = f"is {reprlib.repr(self._values[name])}" if name in self._values else "is missing"
        raise CheckpointError(f"{self._file}: {path} {problem}; specdec needs {supported}", field=path)

    def names(self) -> tuple[str, ...]:
        """Return the present fields, in the file's order."""
        return tuple(name for name in self._values if name in self)

    def _spelling(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self), names[0])

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """Read an integer; without a default the field is required."""
        name, value = self._spelling(names), self.get(*names)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(name, f"an integer of at least {least}")
        if value > most:
            self.refuse(name, f"an integer of at most {most}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Read a finite number; without a default the field is required."""
        name, value = self._spelling(names), self.get(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(name, "a finite number")
        if name.endswith(("eps", "epsilon")) and value < 0:
            self.refuse(name, "a number of at least 0")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Read `count` finite numbers; an absent field means all 1."""
        value = self.get(name)
        value = [1.0] * count if value is None else value
        is_list = isinstance(value, list | tuple) and len(value) == count
        if not is_list or not all(type(entry) in (int, float) and math.isfinite(entry) for entry in value):
            self.refuse(name, f"a list of {count} finite numbers")
        return tuple(float(entry) for entry in value)

    def string(self, name: str, default: str | None = None) -> str:
        """Read a string; without a default the field is required."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            self.refuse(name, "a string")
        return value

    def flag(self, *names: str, default: bool) -> bool:
        """Read true or false."""
        value = self.get(*names)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(self._spelling(names), "true or false")
        return value

    def strings(self, *names: str) -> tuple[str, ...] | None:
        """Read a list of strings, or None if the field is absent."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            self.refuse(self._spelling(names), "a list of strings")
        return tuple(value)

    def integers(self, *names: str) -> tuple[int, ...]:
        """Read one integer, a list of them, or nothing."""
        value = self.get(*names)
        value = [] if value is None else [value] if isinstance(value, int) else value
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            self.refuse(self._spelling(names), "an integer or a list of them")
        return tuple(value)

    def tokens(self, name: str, vocab: int) -> tuple[int, ...]:
        """Read one token id, a list of them, or nothing; each must have a row in the model's vocabulary."""
        ids = self.integers(name)
        if not all(0 <= token < vocab for token in ids):
            self.refuse(name, f"token ids of the model's vocabulary, from 0 to {vocab - 1}")
        return ids

    def within(self, name: str) -> "Fields":
        """Return the fields of a nested object; an absent one is empty."""
        value = self.get(name)
        if not isinstance(value, Mapping | None):
            self.refuse(name, "an object with fields")
        return Fields(value or {}, f"{self._where}.{name}" if self._where else name, file=self._file)

    def only(self, name: str, *supported: object) -> None:
        """Refuse unsupported values of an option; an absent option is supported."""
        if name in self and self._values[name] not in supported:
            self.refuse(name, " or ".join(repr(value) for value in supported))

    def absent(self, name: str, supported: str) -> None:
        """Refuse an option that changes what the network computes, unless it is off."""
        if name in self and self._values[name] is not False:
            self.refuse(name, supported)

    def divides(self, small: str, large: str) -> None:
        """Check that `small` divides `large` if both are present."""
        if small in self and large in self and self.integer(large) % self.integer(small):
            self.refuse(large, f"a multiple of {small} ({self.integer(small)})")
