"""specdec: an inference engine for hybrid language models whose core loop is speculative decoding."""

import os

# A CPU reads weights in huge pages a fifth faster. Torch looks at this once, at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# OpenMP's threads wait awake for each other: here so long that those who come at once are met. By default it
# is sixty times that, and on a processor that others use too it is the time of the very thread they wait for.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

from specdec.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineError,
    RequestError,
    SpecdecError,
)

__version__ = "0.1.0"
__all__ = [
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Delta",
    "EngineConfig",
    "EngineError",
    "RequestError",
    "RequestStats",
    "SamplingParams",
    "SpecEngine",
    "SpecdecError",
    "Structure",
    "ThinkingSpan",
]

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs more than all the rest
if TYPE_CHECKING:
    from specdec.config.engine import EngineConfig
    from specdec.config.sampling import SamplingParams
    from specdec.config.structured import Structure
    from specdec.config.thinking import ThinkingSpan
    from specdec.core.outputs import Completion, Delta, RequestStats
    from specdec.engine.engine import SpecEngine
else:
    _HOMES = {
        "Completion": "core.outputs",
        "Delta": "core.outputs",
        "EngineConfig": "config.engine",
        "RequestStats": "core.outputs",
        "SamplingParams": "config.sampling",
        "SpecEngine": "engine.engine",
        "Structure": "config.structured",
        "ThinkingSpan": "config.thinking",
    }

    def __getattr__(name):
        """Import a public name on first use, so that commands start fast."""
        if name not in _HOMES:
            raise AttributeError(f"module 'specdec' has no attribute {name!r}")
        import importlib

        value = getattr(importlib.import_module(f"specdec.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
