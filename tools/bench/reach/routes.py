"""Routes of a request through two engines, in the position of a router."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from itertools import cycle
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from specdec.http.client import reason
from specdec.ray.two_step import LEND
from tools.bench.reach.reply import EXCERPT, StreamedReply, stream

Body = Mapping[str, Any]


class BenchRoute(Protocol):
    """Send requests to two engines."""

    name: str
    fetches: bool
    """Whether the answering engine fetches KV that another one has prefilled."""

    async def ask(
        self, session: aiohttp.ClientSession, body: Body, due_s: float | None = None
    ) -> StreamedReply:
        """Send a completion and read the answer to its end; `due_s` is the planned start, now or earlier."""
        ...


class StandaloneRoute:
    """Standalone engines, in turn."""

    fetches = False

    def __init__(self, name: str, *urls: str) -> None:
        self.name, self._urls = name, cycle(urls)

    async def ask(
        self, session: aiohttp.ClientSession, body: Body, due_s: float | None = None
    ) -> StreamedReply:
        reply = StreamedReply(time.perf_counter() if due_s is None else due_s)
        await stream(session, next(self._urls), body, reply)
        return reply


class ProxiedRoute:
    """vLLM's way: the prefill instance's answer is passed to the decode instance."""

    name, fetches = "P/D, vLLM's way", True

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill, decode

    async def ask(
        self, session: aiohttp.ClientSession, body: Body, due_s: float | None = None
    ) -> StreamedReply:
        reply = StreamedReply(time.perf_counter() if due_s is None else due_s)
        asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": dict(LEND)}
        try:
            async with session.post(f"{self._prefill}/v1/completions", json=asked) as answer:
                if answer.status != 200:
                    reply.failure = f"prefill: HTTP {answer.status}: {(await answer.text())[:EXCERPT]}"
                    return reply
                params = (await answer.json())["kv_transfer_params"]
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            reply.failure = f"prefill: {reason(error)}"
            return reply
        await stream(session, self._decode, {**body, "kv_transfer_params": params}, reply)
        return reply


class BootstrapRoomRoute:
    """SGLang's way: both instances get the request at once, and meet in a bootstrap room."""

    name, fetches = "P/D, SGLang's way", True

    def __init__(self, prefill: str, decode: str, port: int) -> None:
        self._prefill, self._decode = prefill, decode
        self._place = {"bootstrap_host": urlsplit(prefill).hostname, "bootstrap_port": port}

    async def ask(
        self, session: aiohttp.ClientSession, body: Body, due_s: float | None = None
    ) -> StreamedReply:
        reply = StreamedReply(time.perf_counter() if due_s is None else due_s)
        asked = {**body, **self._place, "bootstrap_room": secrets.randbits(63)}
        read = asyncio.create_task(self._read(session, asked))
        try:
            await stream(session, self._decode, asked, reply)
            reply.failure = await read or reply.failure
        finally:
            read.cancel()
        return reply

    async def _read(self, session: aiohttp.ClientSession, body: Body) -> str | None:
        """Prefill the prompt; return the failure, if any."""
        try:
            async with session.post(
                f"{self._prefill}/v1/completions", json={**body, "stream": False}
            ) as answer:
                said = await answer.text()
                return None if answer.status == 200 else f"prefill: HTTP {answer.status}: {said[:EXCERPT]}"
        except (aiohttp.ClientError, OSError) as error:
            return f"prefill: {reason(error)}"
