"""Settings as command-line options: one `--dashed-name` per field, generated from the settings class."""

import argparse
import json
import os
import re
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from specdec.config.aliases import ALIASES, INSTEAD, SHORT, Alias
from specdec.config.base import Settings
from specdec.config.parser import Help
from specdec.errors import ConfigError

S = TypeVar("S", bound=Settings)
Run = Callable[[], None]
"""Runs a command after its options are parsed and its imports done."""

COMMON = frozenset(
    {
        *("device", "dtype", "draft", "num_steps", "topk"),
        *("memory_bytes", "max_running", "max_model_len", "prefix_cache"),
        *("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "n"),
        *("host", "port", "served_model_name", "api_key", "allowed_origins", "role"),
        *("num_replicas", "max_replicas", "num_cpus", "num_gpus", "ray_address"),
        *("replicas", "replicas_file", "replicas_dns", "prefill", "decode", "pd_protocol"),
    }
)
"""Settings shown by --help, in a line or two each; --help-all shows all, at length."""
TEXTS = r'"\n\n", or ["\n\n", "END"] for several'
"""How to type strings as JSON."""
SWITCH = MappingProxyType({"on": True, "true": True, "off": False, "false": False})
"""Words for True and False."""


def add_settings(
    parser: argparse.ArgumentParser,
    settings: type[Settings],
    *,
    title: str,
    without: Collection[str] = (),
    says: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add an option per field, and other engines' names of them; `says` replaces a field's help.

    Options not given set no attribute, so that the class's defaults apply.
    """
    group, absent = parser.add_argument_group(title), argparse.SUPPRESS
    fields = {name: field for name, field in settings.model_fields.items() if name not in without}
    for name, field in fields.items():
        if not any(issubclass(kind, dict | Settings) for kind in kinds_of(field.annotation)):
            _add_field(group, name, field, says.get(name))
    for name, alias in ALIASES.items():
        if fields.keys() >= {*alias.fields}:
            _add_alias(group, name, alias, fields)
    for name, advice in INSTEAD.get(settings.__name__, {}).items():
        names = (option_of(name), *SHORT.get(name, ()))
        group.add_argument(
            *names, action=_RefusedOption, advice=advice, nargs="?", default=absent, help=absent
        )


class _AliasAction(argparse.Action):
    """Sets the settings that another engine's option translates to."""

    def __init__(self, *, alias: Alias, **settings: Any) -> None:
        super().__init__(**settings)
        self.alias, self.sets = alias, alias.fields

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: Any = None
    ) -> None:
        """Parse the value; that of a switch is in its name."""
        selected = not option.startswith("--no-") if self.alias.is_switch else value
        try:
            for field, item in self.alias.read(selected).items():
                setattr(namespace, field, item)
        except ConfigError as error:
            parser.error(str(error))


class _RefusedOption(argparse.Action):
    """An option that is refused with advice."""

    def __init__(self, *, advice: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.advice = advice

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: Any = None
    ) -> NoReturn:
        """Exit with the advice."""
        parser.error(f"{option} is not supported: {self.advice}")


def add_options(
    parser: argparse.ArgumentParser, settings: type[Settings], *, without: Collection[str] = ()
) -> None:
    """Add an option per field of a small command: all are shown, and lists are comma-separated."""
    for name, field in settings.model_fields.items():
        if name in without:
            continue
        kinds = kinds_of(field.annotation)
        default = ",".join(map(str, field.default)) if list in kinds and field.default else field.default
        is_told = bool not in kinds and default not in (None, [])
        help_text = f"{field.title}{f' (default: {default})' if is_told else ''}"
        option, absent = option_of(name), argparse.SUPPRESS
        if bool in kinds:
            switch = argparse.BooleanOptionalAction if field.default else "store_true"
            parser.add_argument(option, action=switch, default=absent, help=help_text)
            continue
        read: Callable[[str], object] = str if str in kinds | _listed_kinds(field.annotation) else _decimal
        read = Path if Path in kinds else read
        metavar = "FILE" if Path in kinds else name.rsplit("_", 1)[-1].upper()
        type_ = listed(read) if list in kinds else read
        parser.add_argument(option, metavar=metavar, type=type_, default=absent, help=help_text)


def settings_from(args: argparse.Namespace, settings: type[S]) -> S:
    """Build settings from the given options; invalid ones raise ConfigError."""
    values = {name: value for name, value in vars(args).items() if name in settings.model_fields}
    # A list given once, as None, counts as not given.
    return settings.model_validate({name: None if x == [None] else x for name, x in values.items()})


def secret(name: str | None) -> str | None:
    """Return a key from the environment: the command line is visible to every user of the machine."""
    if name is not None and name not in os.environ:
        raise ConfigError(f"--api-key-env: no variable {name!r} is set; export it first", field="api_key_env")
    return None if name is None else os.environ[name]


def option_of(name: str) -> str:
    """Return a setting's option name."""
    return f"--{name.replace('_', '-')}"


def _add_alias(
    group: argparse._ArgumentGroup, name: str, alias: Alias, settings: Mapping[str, FieldInfo]
) -> None:
    option, targets = option_of(name), ", ".join(map(option_of, alias.fields))
    group.add_argument(
        *([option, f"--no-{option[2:]}"] if alias.is_switch else [option, *SHORT.get(name, ())]),
        action=_AliasAction,
        alias=alias,
        dest=alias.fields[0],
        nargs=0 if alias.is_switch else None,
        metavar=name.rsplit("_", 1)[-1].upper(),
        type=_reader(settings[alias.fields[0]]) if len(alias.fields) == 1 else str,
        default=argparse.SUPPRESS,
        help=Help(f"{targets}, by its name in {alias.engine}{f': {alias.note}' if alias.note else ''}", ""),
    )


def _add_field(group: argparse._ArgumentGroup, name: str, field: FieldInfo, override: str | None) -> None:
    option, kinds = option_of(name), kinds_of(field.annotation)
    help_text = Help(override or _help(field), (override or _brief(field)) if name in COMMON else "")
    absent = argparse.SUPPRESS
    if bool in kinds:
        switch = argparse.BooleanOptionalAction
        group.add_argument(option, dest=name, action=switch, default=absent, help=help_text)
        return
    is_list = list in kinds and float not in kinds
    group.add_argument(
        *SHORT.get(name, ()),
        option,
        dest=name,
        metavar=name.rsplit("_", 1)[-1].upper(),
        type=_reader(field),
        action="append" if is_list else "store",
        default=absent,
        help=help_text,
    )


def _help(field: FieldInfo) -> str:
    kinds = kinds_of(field.annotation)
    syntax = ""
    if list in kinds:
        syntax = "; a list is written 0.9,0.5" if float in kinds else "; one each time, may be repeated"
    return f"{field.title}: {field.description}{syntax}{_default(field)}".replace("%", "%%")


def _brief(field: FieldInfo) -> str:
    """Return the first part of a field's title, with its default."""
    return f"{(field.title or '').partition(';')[0]}{_default(field)}".replace("%", "%%")


def _default(field: FieldInfo) -> str:
    return "" if field.default is None else f" (default: {field.default})"


def read_value(field: FieldInfo, text: str) -> object:
    """Parse typed text for a field: `on`, `none`, or JSON if it starts with a quote or bracket."""
    kinds = kinds_of(field.annotation)
    if bool in kinds:
        return SWITCH.get(text.lower(), text)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    if text.startswith(('"', "[")):
        try:
            return json.loads(text)
        except ValueError:
            if str in kinds | _listed_kinds(field.annotation):
                message = f"{text!r:.40} looks like JSON but is not valid; write {TEXTS}"
                raise ConfigError(message) from None
    value = _reader(field)(text)
    return [value] if list in kinds and type(value) not in kinds else value


def _reader(field: FieldInfo) -> Callable[[str], object]:
    """Return the parser of an option's text."""
    texts = str in kinds_of(field.annotation) | _listed_kinds(field.annotation)

    def read(value: str) -> object:
        if means_none(field, value):
            return None
        return value if texts else _number(value)

    return read


def means_none(field: FieldInfo, value: object) -> bool:
    """Return whether a value is the word for None, which could also be one of several stop strings."""
    kinds = kinds_of(field.annotation)
    may_be_none = types.NoneType in kinds and not {str, list} <= kinds
    return may_be_none and isinstance(value, str) and value.lower() == "none"


def kinds_of(annotation: Any) -> set[type]:
    """Return the types of a field's values: list or dict, but not their elements."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return set().union(*map(kinds_of, get_args(annotation)))
    if origin is Annotated:
        return kinds_of(get_args(annotation)[0])
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    return {origin or annotation}


def _listed_kinds(annotation: Any) -> set[type]:
    """Return the element types of a list field."""
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*map(_listed_kinds, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        return _listed_kinds(get_args(annotation)[0])
    return kinds_of(get_args(annotation)[0]) if get_origin(annotation) is list else set()


def _number(value: str) -> object:
    """Parse a number or list of numbers; other text is left for the settings to refuse."""
    items = value.strip().removeprefix("[").removesuffix("]")
    if items == value.strip() and "," not in items:
        return _decimal(items)
    numbers = [_decimal(part.strip()) for part in items.split(",")]
    return value if any(isinstance(number, str) for number in numbers) else numbers


def _decimal(text: str) -> int | float | str:
    """Parse a number, including .5 and 1.; other text is returned unchanged."""
    if re.fullmatch(r"[+-]?\d{1,30}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE) else text


def at_least(smallest: int) -> Callable[[str], int]:
    """Return an option type: integers of at least `smallest`."""

    def read(value: str) -> int:
        number = _decimal(value)
        if not isinstance(number, int):
            raise argparse.ArgumentTypeError(f"{value!r} is not an integer")
        if number < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return number

    return read


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return an option type: comma-separated values."""

    def read(value: str) -> list[Any]:
        try:
            return [parse(part.strip()) for part in value.split(",")]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; write values between commas") from None

    return read


def one_of(*names: str) -> Callable[[str], str]:
    """Return an option type: one of these words."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read
