"""The server's log for people and for programs, and what it must omit."""

import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from specdec.server.logs import FORMATTERS
from tests.selection import only
from tests.server.faulty import FILE
from tests.server.live import Live, total
from tests.server.test_guards import LONG, PLAIN, open_stream, running, wait_for

POLLED = ("/health", "/ready", "/metrics")


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    failed = sys.exc_info() if sys.exc_info()[0] else None
    return logging.getLogger("specdec.x").makeRecord(
        "specdec.x", logging.WARNING, __file__, 1, message, args, failed, extra=extra
    )


def test_a_json_log_line_has_time_message_and_extra_fields() -> None:
    own = record("%d of\n%s", 2, "\x1bé\u2028", status=200, path=Path("a"), _private=1)
    text = FORMATTERS["json"].format(own)
    assert text.isascii() and text.isprintable()
    line = json.loads(text)
    when = datetime.fromisoformat(line.pop("time"))
    assert when.utcoffset() == timedelta(0)
    assert when == datetime.fromtimestamp(int(own.created * 1e3) / 1e3, UTC)
    wanted = {"level": "WARNING", "logger": "specdec.x", "message": "2 of\n\x1bé\u2028"}
    assert line == wanted | {"status": 200, "path": "a"}


def test_an_exception_is_a_field_of_its_log_line() -> None:
    try:
        raise ValueError("inside")
    except ValueError:
        text = FORMATTERS["json"].format(record("it failed"))
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "it failed" and line["trace"].endswith("ValueError: inside")


@pytest.mark.parametrize("verbose", only({False}, [True, False]))
def test_polled_routes_do_not_fill_the_log(verbose: bool) -> None:
    with Live(*PLAIN, *(["-v"] if verbose else [])) as live:
        assert [live.ask(path).status for path in (*POLLED, "/v1/models")] == [200] * 4
        lines = live.stop()[1].splitlines()
    for path in POLLED:
        assert [" DEBUG " in line for line in lines if f" GET {path} 200 " in line] == [True] * verbose
    assert [" INFO " in line for line in lines if " GET /v1/models 200 " in line] == [True]


def test_a_log_for_programs_has_nothing_else_and_no_prompt(tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    options = (*PLAIN, "--log-format", "json")
    with (
        Live(*options, env={FILE: str(fault)}, entry="tests.server.faulty") as live,
        ThreadPoolExecutor(1) as pool,
    ):
        secret = LONG | {"prompt": "a secret", "n": 2, "max_tokens": 3500}
        assert live.ask("/v1/completions", secret | {"max_tokens": 2}, X_Request_ID="served").status == 200
        assert live.ask("/v1/completions", secret | {"n": 0}, X_Request_ID="refused").status == 400
        asked = pool.submit(live.ask, "/v1/completions", secret, X_Request_ID="failed")
        wait_for(lambda: total(live.metrics(), "vllm:time_to_first_token_seconds_count") == 4)
        fault.write_text("said in part")
        assert asked.result().failure["code"] == "engine_error"
        sock = open_stream(live, secret | {"stream": False})
        wait_for(lambda: running(live) == 2)
        sock.close()
        wait_for(lambda: running(live) == 0)
        log = live.stop()[1]
    assert "a secret" not in log
    said = [line for line in log.splitlines() if not line.startswith("{")]
    assert len(said) == 1 and said[0].startswith("serving ")  # not a log line
    lines = [json.loads(line) for line in log.splitlines() if line not in said]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    found = {(line["request_id"], line["level"]): line for line in lines if "request_id" in line}
    failed = found.pop(("failed", "ERROR"))
    assert "failed in mid-stream" in failed["message"]
    about = {"method": "POST", "path": "/v1/completions", "logger": "specdec.server.app"}
    for number, status in (("served", 200), ("refused", 400), ("failed", 200)):
        line = found.pop((number, "INFO"))
        assert line.items() >= (about | {"status": status}).items() and line["ms"] > 0
    (gone,) = found.values()
    assert gone.items() >= (about | {"status": 499}).items() and "client disconnected" in gone["message"]
    assert [line["message"][:13] for line in lines if "told to fail" in line.get("trace", "")] == [
        "a step failed"
    ]
