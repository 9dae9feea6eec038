"""Settings as command-line options: one `--dashed-name` for each field, made from the settings class."""

import argparse
import json
import types
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from specdec.config import Settings

S = TypeVar("S", bound=Settings)


def add_settings(
    parser: argparse.ArgumentParser, settings: type[Settings], *, title: str, without: Collection[str] = ()
) -> None:
    """Add an option for each field. Those not given leave no trace, so that the class keeps its defaults."""
    group = parser.add_argument_group(title)
    for name, field in settings.model_fields.items():
        if name not in without and dict not in _kinds(field.annotation):
            _add_field(group, name, field)


def settings_from(args: argparse.Namespace, settings: type[S]) -> S:
    """Build the settings from the options that were given; what they refuse is a ConfigError."""
    given = {name: value for name, value in vars(args).items() if name in settings.model_fields}
    return settings.model_validate(given)


def _add_field(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    option, kinds, says = f"--{name.replace('_', '-')}", _kinds(field.annotation), _help(field)
    absent = argparse.SUPPRESS
    if bool in kinds:
        switch = argparse.BooleanOptionalAction
        group.add_argument(option, dest=name, action=switch, default=absent, help=says)
        return
    is_list = list in kinds and float not in kinds
    group.add_argument(
        option,
        dest=name,
        metavar=name.rsplit("_", 1)[-1].upper(),
        type=_text if str in kinds else _number,
        action="append" if is_list else "store",
        default=absent,
        help=f"{says}; may be repeated" if is_list else says,
    )


def _help(field: FieldInfo) -> str:
    described = field.description or ""
    default = "" if field.default is None else f" (default: {field.default})"
    return f"{described}{default}".replace("%", "%%")


def _kinds(annotation: Any) -> set[type]:
    """Return the types that a value may have: a list's or a mapping's own, not those of what is in it."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    return {origin or annotation}


def _text(value: str) -> str:
    return value


def _number(value: str) -> object:
    """Read a number or a list of them; the rest stays text, for the settings to refuse in their words."""
    try:
        return json.loads(value, parse_constant=_text)
    except ValueError:
        return value


def at_least(smallest: int) -> Callable[[str], int]:
    """Make a type of option that reads a whole number and bounds it below."""

    def read(value: str) -> int:
        number = int(value)
        if number < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return number

    return read


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Make a type of option that reads values between commas."""

    def read(value: str) -> list[Any]:
        try:
            return [parse(part.strip()) for part in value.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is no list of values between commas") from None

    return read
