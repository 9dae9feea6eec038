"""A client of OpenAI-style servers: addresses, the events of a stream, failures in words."""

import errno
import re
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aiohttp

from specdec.errors import ConfigError

LOCAL, PORT = "127.0.0.1", 8000
"""Where `specdec serve` listens by default."""
NO_ANSWER = "nothing answers there"
"""Reason where a connection is refused."""
DONE = "[DONE]"
"""What the last event of a stream holds."""


def is_url(name: str) -> bool:
    """Return whether a name is the address of a server."""
    try:
        parts = urlsplit(name)
        has_host = bool(re.fullmatch(r"\S*[^\d\s]\S*", parts.hostname or ""))
        return parts.scheme in ("http", "https") and has_host and parts.port != 0
    except ValueError:  # of a port that is no number, or brackets that do not close
        return False


def base_url(url: str) -> str:
    """Return the address under which `/v1` and `/metrics` lie."""
    return url.rstrip("/").removesuffix("/v1")


def check_url(text: str) -> str:
    """Return the address under which all of a server lies; refuse what is no address.

    A URL is taken as it is. HOST[:PORT] and a PORT of this machine are those of `specdec serve`.
    """
    url = text if "://" in text else _completed(text)
    if not is_url(url):
        raise ConfigError(
            f"url: {text!r} is not the address of a server; give one such as http://localhost:{PORT}",
            field="url",
        )
    return base_url(url)


def _completed(text: str) -> str:
    """Add what an address without a scheme lacks of a URL."""
    port = text.removeprefix(":")
    host, slash, path = (f"{LOCAL}:{port}" if port.isdecimal() else text).partition("/")
    has_port = re.search(r":\w+$", host)
    return f"http://{host if has_port else f'{host}:{PORT}'}{slash}{path}"


async def ask_model(session: aiohttp.ClientSession, base: str) -> str:
    """Return the first model that a server says it serves."""
    async with session.get(f"{base}/v1/models", raise_for_status=True) as reply:
        name = (await reply.json())["data"][0]["id"]
    return str(name)


async def event_data(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield what each server-sent event holds, `[DONE]` too; a line may have any length."""
    rest = b""
    async for piece in reply.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if data := _data(line):
                yield data
    if data := _data(rest):
        yield data


def _data(line: bytes) -> str:
    """Return a line's data; comments and other fields have none."""
    text = line.decode("utf-8", "replace").strip()
    if text.startswith("error:"):  # older llama.cpp's own field
        return f'{{"error": {text.removeprefix("error:")}}}'
    return text.removeprefix("data:").strip() if text.startswith("data:") else ""


def reason(error: Exception) -> str:
    """Describe in words what went wrong with a server; some errors have no text."""
    match error:
        case aiohttp.ClientSSLError():
            return f"no encrypted connection: {error}"
        case aiohttp.ClientConnectorError() if error.errno in (None, errno.ECONNREFUSED):
            return NO_ANSWER
        case aiohttp.ClientConnectorError():
            return f"it cannot be reached: {error.strerror or error}"
        case aiohttp.ClientResponseError():
            return f"it answered {error.status} {error.message} to {error.request_info.url.path}"
        case aiohttp.ClientPayloadError() | ConnectionResetError():
            return "the connection broke in mid-stream"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            return "it closed the connection without an answer"
        case LookupError() | TypeError() | AttributeError():
            return "its answer has not the fields of that API"
        case TimeoutError():
            return "it took too long"
    return str(error) or type(error).__name__
