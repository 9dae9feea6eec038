"""Measurements on disk, one per line, so that an interrupted run can resume."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specdec.bench.acceptance.measure import Measurement
from specdec.errors import ConfigError

FILE = "measurements.jsonl"

Key = tuple[Any, ...]


class ResultStore:
    """Own the measurements; with a folder, each is written there at once."""

    def __init__(self, folder: Path | None, run: Mapping[str, Any]) -> None:
        """Load the measurements of a run with these arguments from the folder; refuse another run's."""
        self.measured: dict[Key, Measurement] = {}
        self._path = folder / FILE if folder else None
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = list(_whole_lines(self._path.read_bytes())) if self._path.exists() else []
            if lines:
                self._read(lines, json.loads(json.dumps(run)))
            # Drop a half-written last line of a killed run.
            self._path.write_text("".join(f"{line}\n" for line in lines or [json.dumps(run)]), "utf-8")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--out: {self._path} cannot be read or written ({error}); name another folder, or remove it",
                field="out",
            ) from error

    def get(self, *key: Any) -> Measurement | None:
        """Return the measurement for a key."""
        return self.measured.get(key)

    def add(self, *key: Any, measurement: Measurement) -> None:
        """Store a measurement."""
        self.measured[key] = measurement
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **measurement.as_json()}) + "\n")

    def _read(self, lines: Iterable[str], run: Mapping[str, Any]) -> None:
        first, *rest = (json.loads(line) for line in lines)
        moved = [name for name in {*first, *run} if first.get(name) != run.get(name)]
        if moved:
            name = min(moved, key=lambda name: (name != "commit", name))  # a commit explains the rest
            raise ConfigError(
                f"--out: {self._path} holds measurements with another {name} ({_short(first.get(name))}, not "
                f"{_short(run.get(name))}); repeat that run as it was to go on, or name another folder",
                field="out",
            )
        for fields in rest:
            key = tuple(fields.pop("key"))
            self.measured[key] = Measurement.of(fields)


def _whole_lines(data: bytes) -> list[str]:
    return data.decode("utf-8").split("\n")[:-1]


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
