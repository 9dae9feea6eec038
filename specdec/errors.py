"""Everything specdec raises on purpose.

SpecdecError
├── ConfigError        a setting is unknown, out of range, or contradicts another
├── CheckpointError    a model folder, file or tensor is not what its config promises
├── RequestError       a prompt or its parameters cannot be served
├── CapacityError      the memory given cannot hold what was asked for
└── EngineError        the engine failed or was closed; the request was not at fault
"""

import copy

CLOSED = "The engine is closed; create a new SpecEngine."

TYPE_CHECKING = False  # as in specdec/__init__.py
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Self


class SpecdecError(Exception):
    """Base of all errors; the message names the cause and the remedy.

    `field` names the setting, parameter or tensor at fault, where there is one. `completions` holds what
    `generate` had of its prompts when one failed while it ran, in order; those that failed have an `error`.
    """

    completions: "tuple[Any, ...]" = ()

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def having(self, completions: "Iterable[Any]") -> "Self":
        """Return a copy that holds what all prompts came to: several callers may have been sent this one."""
        told = copy.copy(self)
        told.completions = tuple(completions)
        return told


class ConfigError(SpecdecError):
    pass


class CheckpointError(SpecdecError):
    pass


class RequestError(SpecdecError):
    pass


class CapacityError(SpecdecError):
    pass


class EngineError(SpecdecError):
    pass
