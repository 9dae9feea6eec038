"""How the server's log is written: as lines for people, or as JSON for programs."""

import json
import logging
from datetime import UTC, datetime

OWN = {*vars(logging.makeLogRecord({})), "message", "asctime"}
"""What every record has; the rest is what its line was given by `extra`."""


class JsonLines(logging.Formatter):
    """Write one JSON object a line: when, how grave, who, what, its own fields, and what was raised."""

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
"""By `log_format`. A server's log is read long after: its lines have their times."""
