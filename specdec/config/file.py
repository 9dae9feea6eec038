"""`--config FILE`: settings in YAML, under option names. The command line takes precedence."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.config.aliases import ALIASES, INSTEAD
from specdec.config.base import Settings
from specdec.config.options import kinds_of, means_none, read_value
from specdec.config.parser import as_written, near
from specdec.errors import ConfigError

MODEL = "model"


@dataclass(frozen=True, slots=True)
class ConfigLine:
    """A line of a file, with the name as written."""

    name: str
    value: Any
    line: int


def add_model_and_file(parser: argparse.ArgumentParser, help_text: str, *, several: bool = False) -> None:
    """Add the MODEL argument, or several, with this help, and `--config`; a file may set MODEL too."""
    nargs, absent = "*" if several else "?", argparse.SUPPRESS
    parser.add_argument(MODEL, metavar="MODEL", nargs=nargs, default=absent, help=help_text)
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="settings in YAML; options take precedence"
    )


def fill_in(args: argparse.Namespace, *classes: type[Settings], several: bool = False) -> None:
    """Set settings of these classes, and MODEL, that are only in the file.

    The file is validated by itself, whatever the command line says.
    """
    entries = _by_field(args.config, classes, several=several) if args.config is not None else {}
    for settings in classes:
        _check(args.config, settings, entries)
    for field, entry in entries.items():
        if not hasattr(args, field):
            setattr(args, field, entry.value)
    if not hasattr(args, MODEL):
        hint = "in a file for --config: a folder, OWNER/NAME on the Hugging Face hub, or tiny"
        if args.config is not None:
            hint = f"in {args.config}, which {'names none' if entries else 'is empty'}"
        raise ConfigError(f"MODEL is missing: name it, or name it {hint}", field=MODEL)


def fill_from(args: argparse.Namespace, values: Mapping[str, Any], *classes: type[Settings]) -> None:
    """Set settings of these classes, and MODEL, from a mapping of option names; text is parsed as typed."""
    fields = {name: field for settings in classes for name, field in settings.model_fields.items()}
    for name, value in values.items():
        field = fields.get(name.replace("-", "_"))
        parsed = read_value(field, value) if field and isinstance(value, str) else value
        for dest, setting in _meaning(ConfigLine(name, parsed, 0), classes, several=False).items():
            setattr(args, dest, setting)


def _by_field(path: Path, classes: tuple[type[Settings], ...], *, several: bool) -> dict[str, ConfigLine]:
    """Return entries by field; two entries for one field raise."""
    entries: dict[str, ConfigLine] = {}
    for entry in _entries(path):
        try:
            meaning = _meaning(entry, classes, several=several)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {entry.line}: {error}", field=error.field) from None
        for field, value in meaning.items():
            if field in entries:
                first = entries[field]
                raise ConfigError(
                    f"{path}, line {entry.line}: {entry.name} sets {field}, as {first.name} of line "
                    f"{first.line} does; leave one out",
                    field=field,
                )
            entries[field] = ConfigLine(entry.name, value, entry.line)
    return entries


def _meaning(
    entry: ConfigLine, classes: tuple[type[Settings], ...], *, several: bool
) -> Mapping[str, object]:
    """Return the fields that an entry sets."""
    fields = {name: field for settings in classes for name, field in settings.model_fields.items()}
    name = entry.name.replace("-", "_")
    if name == MODEL:
        models = entry.value if several and isinstance(entry.value, list) else [entry.value]
        if not models or not all(isinstance(model, str) for model in models):
            more = ", or a list of them" if several else ""
            raise ConfigError(
                f"{entry.name} cannot be {entry.value!r}; give a folder or a name{more}", field=name
            )
        return {name: models if several else models[0]}
    if name in fields:
        return {name: _value(fields[name], entry.value)}
    aliases = {name: model for name, model in ALIASES.items() if fields.keys() >= {*model.fields}}
    if name in aliases:
        return aliases[name].read(entry.value)
    for settings in classes:
        if advice := INSTEAD.get(settings.__name__, {}).get(name):
            raise ConfigError(f"{entry.name} is not a setting here: {advice}", field=name)
    option = [option.replace("_", "-") for option in (MODEL, *fields, *aliases)]
    raise ConfigError(f"{entry.name} is not a setting of this command{near(name, option)}", field=name)


def _value(field: Any, value: object) -> object:
    """Parse a value like the command line does: the word none, and a list of one text."""
    if means_none(field, value):
        return None
    kinds = kinds_of(field.annotation)
    return [value] if isinstance(value, str) and list in kinds and not {str, float} & kinds else value


def _check(path: Path, settings: type[Settings], entries: Mapping[str, ConfigLine]) -> None:
    values = {name: entry.value for name, entry in entries.items() if name in settings.model_fields}
    try:
        settings.model_validate(values)
    except ConfigError as error:
        entry = entries.get(error.field or "")
        line = f", line {entry.line}" if entry else ""
        message = as_written(str(error), {name: values.name for name, values in entries.items()})
        raise ConfigError(f"{path}{line}: {message}", field=error.field) from None


def _entries(path: Path) -> Iterator[ConfigLine]:
    """Yield the entries of a file; YAML tags create plain values only."""
    import yaml  # imported here, since few commands use a file

    try:
        loader = yaml.SafeLoader(path.read_text("utf-8"))
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{path}: it is not a mapping; write lines such as max-running: 64", field="config"
            )
        for key, value in root.value:
            name, line = loader.construct_object(key, deep=True), key.start_mark.line + 1
            if not isinstance(name, str):
                raise ConfigError(f"{path}, line {line}: {name!r} is not an option's name", field="config")
            yield ConfigLine(name, loader.construct_object(value, deep=True), line)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: it is not YAML: {error.problem}", field="config") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(
            f"--config: {path} cannot be read ({reason}); give a file in YAML and UTF-8", field="config"
        ) from None
