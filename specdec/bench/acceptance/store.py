"""What the benchmark keeps of a run: each measurement by its setting and its batch of prompts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.bench.acceptance.measure import Measurement
from specdec.bench.acceptance.settings import Setting
from specdec.bench.kept import Kept

RESULT = "acceptance.json"
"""What a finished run says."""


class Store:
    """Owns what was measured, with a folder also there."""

    def __init__(self, folder: Path | None, run: Mapping[str, Any]) -> None:
        """Read what a run with these arguments left in the folder; refuse what another left there."""
        self._kept = Kept(folder, run, as_json=Measurement.as_json, of=Measurement.of)

    def get(self, setting: Setting, number: int) -> Measurement | None:
        """Return what was measured in a setting of a batch of prompts."""
        return self._kept.get(setting.name, repr(setting.group), number)

    def add(self, setting: Setting, number: int, measurement: Measurement) -> None:
        """Keep a measurement."""
        self._kept.add(setting.name, repr(setting.group), number, measurement=measurement)
