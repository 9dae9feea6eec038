"""Everything specdec raises on purpose.

SpecdecError
├── ConfigError        a setting is unknown, out of range, or contradicts another
├── CheckpointError    a model folder, file or tensor is not what its config promises
├── RequestError       a prompt or its parameters cannot be served
├── CapacityError      the memory given cannot hold what was asked for
└── EngineError        the engine failed or was closed; the request was not at fault
"""


class SpecdecError(Exception):
    """Say what is wrong and what to do about it.

    `field` names the setting, parameter or tensor at fault, where there is one.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


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
