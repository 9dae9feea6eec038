"""Log formats: text lines, or JSON objects; and which model a line is about."""

import contextlib
import json
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

OWN = {*vars(logging.makeLogRecord({})), "message", "asctime"}
"""Standard attributes of a record; the rest came by `extra`."""


@dataclass(slots=True)
class LoggedModel:
    """Which model's engine a thread builds or runs."""

    name: str
    is_repeated: bool
    """Whether it is being built though it was loaded before: what is said of that is in the log already."""


LOGGED_MODEL: ContextVar[LoggedModel | None] = ContextVar("LOGGED_MODEL", default=None)
"""Set where an engine is built; the engine's thread inherits it."""


@contextlib.contextmanager
def naming_model(name: str, *, again: bool) -> Iterator[None]:
    """Name the model in what an engine that is built in the block logs, in its own thread too."""
    model = LoggedModel(name, again)
    token = LOGGED_MODEL.set(model)
    try:
        yield
    finally:
        model.is_repeated = False
        LOGGED_MODEL.reset(token)


class NamingFilter(logging.Filter):
    """Put the model's name before the lines of its engine; leave out what a later load repeats."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Name the model in the record; False where it repeats what the first load has said."""
        model = LOGGED_MODEL.get()
        if model is None:
            return True
        if model.is_repeated and record.levelno <= logging.INFO:
            return False
        if "model" not in vars(record):  # another handler may have named it
            record.msg, record.args = f"{model.name}: {record.getMessage()}", ()
            record.model = model.name
        return True


class JsonLines(logging.Formatter):
    """Write one JSON object a line: time, level, logger, message, extra fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object; nothing in it can begin a new line."""
        when = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in OWN}
        if record.exc_info and record.exc_info[0]:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


FORMATTERS: dict[str, logging.Formatter] = {
    "text": logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"),
    "json": JsonLines(),
}
"""By `log_format`."""
