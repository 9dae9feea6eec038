"""A server in a separate process, and plain HTTP requests to it."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

from tests.forked import ForkedProcess, fork_to_pipe

START_S, STOP_S = 120, 60


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """Return the stream's events; it must end with [DONE]."""
        lines = [line for line in self.data.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @property
    def error(self) -> Any:
        assert set(self.json) == {"error"}
        return self.json["error"]

    @property
    def failure(self) -> Any:
        """Return the error, before the first event or after it."""
        streamed = self.headers["Content-Type"].startswith("text/event-stream")
        return self.events[-1]["error"] if streamed else self.error


class Live:
    """A `specdec serve` process, until the block ends."""

    def __init__(
        self,
        *options: str,
        model: str = "tiny",
        beside: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        entry: str = "specdec.cli",
        tls: ssl.SSLContext | None = None,
        is_fresh: bool = False,
    ) -> None:
        """`is_fresh` starts a new interpreter instead of a fork with the server's modules imported."""
        self.tls, self.is_fresh = tls, is_fresh
        self.key = options[options.index("--api-key") + 1].split()[0] if "--api-key" in options else None
        self.command = [sys.executable, "-m", entry, "serve", model, *beside, "--port", "0", *options]
        self.env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}

    def __enter__(self) -> Self:
        self.process, self.output = self._start()
        self.said: list[str] = []
        for line in self.output:
            self.said.append(line)
            if found := re.search(r"https?://\S+?(?=/v1)", line):
                self.url = found[0]
                # An unread pipe would block the server once full.
                self.reader = threading.Thread(target=self._listen, daemon=True)
                self.reader.start()
                return self
        self.process.wait(timeout=STOP_S)
        raise AssertionError("".join(self.said))

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> "tuple[subprocess.Popen[str] | ForkedProcess, IO[str]]":
        if not self.is_fresh and self.command[:2] == [sys.executable, "-m"]:
            return fork_to_pipe(self.command, self.env)
        process = subprocess.Popen(
            self.command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout
        return process, process.stdout

    def stop(self) -> tuple[int, str]:
        """Stop the server; return its exit code and output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=STOP_S)
        self.reader.join(timeout=STOP_S)
        return code, "".join(self.said)

    def _listen(self) -> None:
        with self.output as lines:
            self.said += lines

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        data: bytes | None = None,
        method: str | None = None,
        **headers: str,
    ) -> Answer:
        """Send a request with a JSON body, or with raw data."""
        sent = json.dumps(body).encode() if body is not None else data
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            self.url + path, sent, {"Content-Type": "application/json", **named}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=600, context=self.tls) as answer:
                return Answer(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers), error.read())

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name including labels."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        lines = self.ask("/metrics", **headers).data.decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def total(metrics: Mapping[str, float], name: str) -> float:
    """Sum a metric over its labels."""
    return sum(value for key, value in metrics.items() if re.match(rf"{re.escape(name)}(\{{|$)", key))


def serving(*options: str) -> Iterator[Live]:
    with Live(*options) as live:
        yield live
