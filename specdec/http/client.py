"""Client for OpenAI-style servers: addresses, event streams, error descriptions."""

import errno
import re
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aiohttp

from specdec.errors import ConfigError

LOCAL, PORT = "127.0.0.1", 8000
"""Default address of `specdec serve`."""
NO_ANSWER = "nothing answers there"
"""Reason for a refused connection."""
DONE = "[DONE]"
"""Data of the last event of a stream."""


def is_url(name: str) -> bool:
    """Return whether a name is the address of a server."""
    try:
        parts = urlsplit(name)
        has_host = bool(re.fullmatch(r"\S*[^\d\s]\S*", parts.hostname or ""))
        return parts.scheme in ("http", "https") and has_host and parts.port != 0
    except ValueError:  # for an invalid port, or unbalanced brackets
        return False


def base_url(url: str) -> str:
    """Return the address above `/v1` and `/metrics`."""
    return url.rstrip("/").removesuffix("/v1")


def check_url(text: str) -> str:
    """Return a server's base address, or raise.

    A URL is used as given. HOST[:PORT] and PORT are completed to the defaults of `specdec serve`.
    """
    url = text if "://" in text else _completed(text)
    if not is_url(url):
        raise ConfigError(
            f"url: {text!r} is not the address of a server; give one such as http://localhost:{PORT}",
            field="url",
        )
    return base_url(url)


def _completed(text: str) -> str:
    """Complete an address without a scheme to a URL."""
    port = text.removeprefix(":")
    host, slash, path = (f"{LOCAL}:{port}" if port.isdecimal() else text).partition("/")
    has_port = re.search(r":\w+$", host)
    return f"http://{host if has_port else f'{host}:{PORT}'}{slash}{path}"


async def ask_model(session: aiohttp.ClientSession, base: str) -> str:
    """Return the first model in a server's list."""
    async with session.get(f"{base}/v1/models", raise_for_status=True) as reply:
        name = (await reply.json())["data"][0]["id"]
    return str(name)


async def event_data(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the data of each server-sent event, including `[DONE]`; lines may have any length."""
    rest = b""
    async for piece in reply.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if data := _data(line):
                yield data
    if data := _data(rest):
        yield data


def _data(line: bytes) -> str:
    """Return a line's data, or "" for comments and other fields."""
    text = line.decode("utf-8", "replace").strip()
    if text.startswith("error:"):  # field of older llama.cpp versions
        return f'{{"error": {text.removeprefix("error:")}}}'
    return text.removeprefix("data:").strip() if text.startswith("data:") else ""


def reason(error: Exception) -> str:
    """Describe a request error in words; some exceptions have no text."""
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
            return "its answer lacks the fields of that API"
        case TimeoutError():
            return "it took too long"
    return str(error) or type(error).__name__
