"""Named model sizes for benchmarks with random weights.

They are Hugging Face configs with the sizes of published models. Not published: `tiny` (the checkpoint in the
package), `0.5b` (`0.8b` with a vocabulary of 32k), `granite-0.4b`, `jamba-0.4b` and `kimi-linear-0.4b` (for
CPUs, without experts), and Falcon-H1's multipliers, whose values do not affect timings.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

_FOLDER = Path(__file__).parents[1] / "assets" / "shapes"

SHAPES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(_FOLDER.glob("*.json"))}
)
