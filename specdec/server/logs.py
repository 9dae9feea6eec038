"""Log formats (text lines or JSON objects), and the model a line is about."""

import contextlib
import json
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

OWN = {*vars(logging.makeLogRecord({})), "message", "asctime"}
"""Standard attributes of a record; all others were passed as `extra`."""


@dataclass(slots=True)
class LoggedModel:
    """The model whose engine a thread builds or runs."""

    name: str
    is_repeated: bool
    """Whether it is being built again, so that its messages are already in the log."""


LOGGED_MODEL: ContextVar[LoggedModel | None] = ContextVar("LOGGED_MODEL", default=None)
"""Set while an engine is built; the engine thread inherits it."""


@contextlib.contextmanager
def naming_model(name: str, *, again: bool) -> Iterator[None]:
    """Prefix log lines of an engine built in this context with the model's name, in its thread too."""
    model = LoggedModel(name, again)
    token = LOGGED_MODEL.set(model)
    try:
        yield
    finally:
        model.is_repeated = False
        LOGGED_MODEL.reset(token)


class NamingFilter(logging.Filter):
    """Prefixes an engine's lines with the model's name; drops repetitions of a later load."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the model's name to the record; return False to drop a repetition."""
        model = LOGGED_MODEL.get()
        if model is None:
            return True
        if model.is_repeated and record.levelno <= logging.INFO:
            return False
        if "model" not in vars(record):  # another handler may have added it
            record.msg, record.args = f"{model.name}: {record.getMessage()}", ()
            record.model = model.name
        return True


class JsonLines(logging.Formatter):
    """Formats records as JSON, one object per line: time, level, logger, message, extra fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object; newlines are escaped."""
        when = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        # Names with an underscore are other libraries': Ray adds a timestamp to every record of a process.
        line |= {n: value for n, value in vars(record).items() if n not in OWN and not n.startswith("_")}
        if record.exc_info and record.exc_info[0]:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


FORMATTERS: dict[str, logging.Formatter] = {
    "text": logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"),
    "json": JsonLines(),
}
"""Formatters by `log_format`."""
