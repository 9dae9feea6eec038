"""`specdec top`: poll a server and show its figures until interrupted."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from specdec.cli.text import paints
from specdec.cli.top.options import TopOptions
from specdec.cli.top.picture import WIDEST, StyledText, heading, picture, shown
from specdec.cli.top.reading import CounterGrowth, ServerReading
from specdec.cli.top.screen import Screen, size
from specdec.errors import EngineError
from specdec.http.client import NO_ANSWER, check_url, reason

ANSWER_S = 5.0
"""Timeout of a request, in seconds."""
FAILURES = (aiohttp.ClientError, OSError, LookupError, TypeError, ValueError, AttributeError)
"""Errors of a server that is unreachable, or is not specdec."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(options: TopOptions, key: str | None) -> None:
    """Show a server until interrupted; once with `--once` or without a terminal."""
    url = check_url(options.url)
    # A dumb terminal cannot be redrawn.
    is_drawn = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    show = _once if options.once or not is_drawn else _live
    asyncio.run(show(url, key, options.model, options.interval))


class ServerPoller:
    """Poll one server over one connection."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        self.url, self.model = url, model
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self.session = aiohttp.ClientSession(headers=headers, timeout=timeout, raise_for_status=True)

    async def read(self) -> ServerReading:
        """Read the requested model's figures, or those of the first warm model."""
        info = await self._info(self.model)
        states = info.get("models", {})
        if self.model is None and states.get(info["model"], "warm") != "warm":
            warm = next((name for name, state in states.items() if state == "warm"), None)
            info = await self._info(warm) if warm else info
        if "steps" not in info and (state := info.get("models", {}).get(info["model"])):
            raise ValueError(f"the model {info['model']!r} is {state}: no figures until it is loaded")
        return ServerReading.of(info, time.monotonic())

    async def _info(self, model: str | None) -> Mapping[str, Any]:
        params = {"model": model} if model else {}
        async with self.session.get(f"{self.url}/server_info", params=params) as reply:
            info: Mapping[str, Any] = await reply.json()
            return info

    def why(self, error: Exception) -> str:
        """Explain a failed reading, with a remedy."""
        message = reason(error)
        if message == NO_ANSWER:
            return f"no server at {self.url}; start one with `specdec serve MODEL`"
        return f"{self.url}: {self._refusal(error) or message}"

    def _refusal(self, error: Exception) -> str | None:
        """Explain an HTTP status that the user's options caused."""
        if isinstance(error, aiohttp.ClientResponseError) and error.status == 401:
            return "the key is missing or invalid: give --api-key, or --api-key-env with its variable"
        if isinstance(error, aiohttp.ClientResponseError) and error.status == 404 and self.model:
            return f"it does not serve the model {self.model!r} (--model), or is not specdec"
        return None


async def _once(url: str, key: str | None, model: str | None, interval_s: float) -> None:
    """Print one snapshot, from two readings, to include rates."""
    source = ServerPoller(url, key, model)
    async with source.session:
        try:
            previous = await source.read()
            await asyncio.sleep(interval_s)
            current = await source.read()
        except FAILURES as error:
            raise EngineError(source.why(error), field="url") from error
    width = size()[0] if sys.stdout.isatty() else None
    lines = [
        *heading(current.shown, url, current.at_s - previous.at_s, None),
        *picture(current, CounterGrowth.between(previous, current), width or WIDEST),
    ]
    print("\n".join(shown(lines, width=width, coloured=paints("auto"))))


async def _live(url: str, key: str | None, model: str | None, interval_s: float) -> None:
    loop, source = asyncio.get_running_loop(), ServerPoller(url, key, model)
    async with source.session:
        with Screen() as screen:
            view = TopView(source, screen)
            task = asyncio.create_task(view.watch(interval_s))
            for number in ENDS:
                loop.add_signal_handler(number, task.cancel)
            loop.add_signal_handler(signal.SIGTSTP, view.pause)
            if screen.keys is not None:
                loop.add_reader(screen.keys, _press, screen.keys, task)
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _press(keys: int, task: asyncio.Task[None]) -> None:
    """Handle typed keys; quit if the terminal is closed."""
    try:
        data = os.read(keys, 1024)
    except OSError:
        data = b""
    if not data or b"q" in data:
        task.cancel()


class TopView:
    """Hold the last reading, and draw it until a newer one arrives."""

    def __init__(self, source: ServerPoller, screen: Screen) -> None:
        self.source, self.screen = source, screen
        self.begun_s = time.monotonic()
        self.reading: ServerReading | None = None
        self.growth: CounterGrowth | None = None
        self.trouble: str | None = None

    async def watch(self, interval_s: float) -> None:
        """Poll and redraw until cancelled."""
        self.draw()
        while True:
            asked_s = time.monotonic()
            await self.look()
            self.draw()
            left_s = interval_s - (time.monotonic() - asked_s)
            await asyncio.sleep(max(left_s, 0))

    async def look(self) -> None:
        """Poll once; after an outage there is no earlier reading to compare with."""
        try:
            reading = await self.source.read()
        except FAILURES as error:
            self.growth, self.trouble = None, f"{self.source.why(error)}; retrying"
            return
        is_continuous = self.reading is not None and self.trouble is None
        self.growth = CounterGrowth.between(self.reading, reading) if self.reading and is_continuous else None
        self.reading, self.trouble = reading, None

    def draw(self) -> None:
        reading, width = self.reading, size()[0]
        now_s, url = time.monotonic(), self.source.url
        watched_s = now_s - self.begun_s
        if reading is None:
            lines = heading(None, url, watched_s, self.trouble)
        else:
            lines = heading(reading.shown, url, watched_s, self.trouble, now_s - reading.at_s)
            lines += picture(reading, self.growth, width)
        ends = "Ctrl-C quits" if self.screen.keys is None else "q or Ctrl-C quits"
        lines += [[], [StyledText(ends)]]
        self.screen.draw(shown(lines, width=width, coloured=paints("auto")))

    def pause(self) -> None:
        """Restore the terminal while the process is stopped."""
        self.screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.screen.enter()
        self.draw()
