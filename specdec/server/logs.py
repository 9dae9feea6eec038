"""Log formats: text lines, or JSON objects."""

import json
import logging
from datetime import UTC, datetime

OWN = {*vars(logging.makeLogRecord({})), "message", "asctime"}
"""Standard attributes of a record; the rest came by `extra`."""


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
