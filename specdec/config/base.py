"""Base of all settings: frozen, with error messages in our own words."""

import difflib
import re
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from specdec.errors import ConfigError

UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MAX_BYTES = 1 << 60
PLAIN = {int, float, str}
SHORT = reprlib.Repr()
"""Formats a value for a message, with bounded length and depth."""
SHORT.maxlevel, SHORT.maxlist, SHORT.maxtuple, SHORT.maxset, SHORT.maxdict = 4, 20, 20, 20, 20
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 100


class Settings(BaseModel):
    """Base of settings; raises `ConfigError` for unknown fields, wrong types and values out of range.

    A field's description says which values are valid, its title what it does; --help and docs/settings.md
    show both.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    def __new__(cls, *values: object, **fields: object) -> Self:
        """Refuse positional arguments with our own message; pydantic handles the rest."""
        if values:
            raise cls._refusal({"": ""}, {})
        return super().__new__(cls)

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(_plain_fields(data) if isinstance(data, dict) else data)
        except ValidationError as error:
            problems = {str(e["loc"][0]) if e["loc"] else "": e["type"] for e in error.errors()}
            raise cls._refusal(problems, data if isinstance(data, Mapping) else {}) from None

    def checked(self) -> Self:
        """Return revalidated settings: `model_copy` and `model_construct` do not validate."""
        values = {
            name: value.checked() if isinstance(value, Settings) else value
            for name, value in self.__dict__.items()
        }
        return type(self).model_validate(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise ConfigError(
            f"{type(self).__name__}.{name} cannot be changed: settings are frozen; make new ones.",
            field=name,
        )

    @classmethod
    def _refusal(cls, problems: Mapping[str, str], data: Mapping[str, object]) -> ConfigError:
        lines = [
            cls._unknown(name) if kind == "extra_forbidden" else cls._wrong_value(name, data.get(name))
            for name, kind in problems.items()
        ]
        return ConfigError(" ".join(lines), field=next(iter(problems)) or None)

    @classmethod
    def _unknown(cls, name: str) -> str:
        close = difflib.get_close_matches(name, cls.model_fields)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(cls.model_fields)}."
        return f"{cls.__name__} has no setting {name!r}; {hint}"

    @classmethod
    def _wrong_value(cls, name: str, value: object) -> str:
        if name not in cls.model_fields:
            example = next(iter(cls.model_fields))
            return f"{cls.__name__} takes settings by name; write {cls.__name__}({example}=…)."
        shown = " ".join(SHORT.repr(value).split())
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        shown = shown if cls.model_fields[name].repr else "what was given"  # secrets are not repeated
        field = cls.model_fields[name]
        words = choices_of(field.annotation) if isinstance(value, str) else []
        close = difflib.get_close_matches(str(value).replace("-", "_"), words, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"{cls.__name__}.{name} cannot be {shown}; give {field.description}{hint}."


def choices_of(annotation: Any) -> list[str]:
    """Return the words that a field accepts."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [word for choice in get_args(annotation) for word in choices_of(choice)]


def describe_choices(annotation: Any) -> str:
    """Return the description of a field that accepts certain words."""
    *others, last = (f'"{word}"' for word in choices_of(annotation))
    return f"{', '.join(others)} or {last}"


def _plain_fields(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """Convert each field's value to plain Python; nested values, as in a schema, are left to the field."""
    return {name: plain(value) for name, value in data.items()}


def plain(value: Any) -> Any:
    """Convert NumPy numbers, arrays, tensors, tuples and sets to plain Python values."""
    match value:
        case dict():
            return {_number(name): _number(item) for name, item in value.items()}
        case list() | tuple() | set() | frozenset() | range():
            # Lists may be as long as a vocabulary, so plain ones are recognised by one pass over the types.
            return list(value) if {*map(type, value)} <= PLAIN else [_number(item) for item in value]
    return _number(value)


def _number(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def contradiction(field: str, message: str) -> ConfigError:
    """Return the error for two settings that exclude each other; `field` is the one to change."""
    return ConfigError(f"{field}: {message}", field=field)


def parse_bytes(value: object) -> object:
    """Parse "2GiB", "512 MB" or "1024" to a number of bytes; other values are returned unchanged."""
    match = (
        re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b?\s*", value, re.IGNORECASE)
        if isinstance(value, str)
        else None
    )
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        return value
    size = float(match[1]) * (1024 if match[3] else 1000) ** UNITS[match[2].lower()]
    return int(size) if size < MAX_BYTES else MAX_BYTES + 1
