"""Where replicas are, as they are written in settings and files."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from specdec.errors import ConfigError
from specdec.route.settings import RouteConfig

MOST = 1024
"""Replicas at most: each is checked once a period."""


SIDE_CHANNEL = ", followed by ?bootstrap=PORT if its side channel does not have bootstrap_port"


class Role(StrEnum):
    """What a replica is asked to do."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Address(NamedTuple):
    """A replica: scheme, host and port; and the port of its side channel."""

    url: str
    role: Role
    host: str
    bootstrap_port: int


def given_addresses(config: RouteConfig) -> list[Address]:
    """Return the replicas of the settings, or of the file that they name; those of a name come later."""
    if config.replicas_file:
        return read_file(config.replicas_file, config.bootstrap_port)
    if config.replicas_dns:
        _named(config.replicas_dns)
        return []
    lists = {Role.BOTH: config.replicas, Role.PREFILL: config.prefill, Role.DECODE: config.decode}
    fields = {Role.BOTH: "replicas", Role.PREFILL: "prefill", Role.DECODE: "decode"}
    found = [
        parse_address(text, role, fields[role], config.bootstrap_port)
        for role, texts in lists.items()
        for text in _split(texts or ())
    ]
    return _distinct(found, "replicas")


def read_file(path: str, bootstrap_port: int) -> list[Address]:
    """Read a file of replicas; its first mistake is a `ConfigError`."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"replicas_file: {path} cannot be read ({why}); give a text file with a replica on each line.",
            field="replicas_file",
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        role = Role(words[0]) if len(words) > 1 and words[0] in set(Role) else Role.BOTH
        rest = words[1:] if role is not Role.BOTH or words[0] == Role.BOTH else words
        if len(rest) != 1:
            raise ConfigError(
                f"replicas_file: {path}, line {number}: write one address such as http://10.0.0.7:8000, "
                "after prefill or decode if it has that role.",
                field="replicas_file",
            )
        found.append(parse_address(rest[0], role, f"replicas_file: line {number}", bootstrap_port))
    if not found:
        raise ConfigError(
            f"replicas_file: {path} names no replica; give one on a line.", field="replicas_file"
        )
    return _distinct(found, "replicas_file")


async def look_up(url: str, bootstrap_port: int) -> list[Address]:
    """Resolve the addresses of a name; a name without any is a `ConfigError`."""
    host, port = _named(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"replicas_dns: {host} has no address ({error.strerror}).", field="replicas_dns"
        ) from None
    hosts = sorted({str(address[0]) for *_, address in found})
    urls = [f"http://[{own}]:{port}" if ":" in own else f"http://{own}:{port}" for own in hosts]
    return [parse_address(own, Role.BOTH, "replicas_dns", bootstrap_port) for own in urls[:MOST]]


def _named(url: str) -> tuple[str, int]:
    """Read the name and the port of what is looked up."""
    own = urlsplit(parse_address(url, Role.BOTH, "replicas_dns", 1).url)
    if own.port is None or own.scheme != "http":
        raise ConfigError(
            f"replicas_dns: {url!r:.80}: give http and a port such as http://replicas.example:8000; "
            "certificates are those of names, not of the addresses that are found.",
            field="replicas_dns",
        )
    return str(own.hostname), own.port


def parse_address(text: str, role: Role, field: str, bootstrap_port: int) -> Address:
    """Read scheme, host and port, and the port of the side channel."""
    try:
        url = urlsplit(text)
        port, host = url.port, url.hostname
        query = dict(parse_qsl(url.query, strict_parsing=True)) if url.query else {}
        bootstrap = int(query.pop("bootstrap", bootstrap_port))
        fits = 1 <= bootstrap <= 65535 and not query and url.path in ("", "/") and not url.fragment
    except ValueError:
        fits, host, port, bootstrap = False, None, None, 0
    if not fits or not host or url.scheme not in ("http", "https") or url.username is not None:
        raise ConfigError(
            f"{field}: {text!r:.80} is no replica's address; give scheme, host and port such as "
            f"http://10.0.0.7:8000, without a path{SIDE_CHANNEL if role is Role.PREFILL else ''}.",
            field=field.partition(":")[0],
        )
    shown = f"[{host}]" if ":" in host else host
    return Address(f"{url.scheme}://{shown}{f':{port}' if port else ''}", role, host, bootstrap)


def _split(texts: Sequence[str]) -> Iterator[str]:
    """Yield what stands between commas."""
    for text in texts:
        yield from filter(None, map(str.strip, text.split(",")))


def _distinct(found: list[Address], field: str) -> list[Address]:
    """Refuse an address that is given twice, and more of them than are checked in time."""
    urls = [own.url for own in found]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ConfigError(f"{field}: {twice} is given twice; leave one out.", field=field)
    if len(found) > MOST:
        raise ConfigError(
            f"{field}: {len(found):,} replicas are more than {MOST:,}; use several routers.", field=field
        )
    return found
