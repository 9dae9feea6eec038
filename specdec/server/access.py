"""Who may ask: those who bring a key, and where none is wanted nobody whom a foreign page sends."""

import hmac
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from specdec.errors import ConfigError
from specdec.server.failures import Failure
from specdec.server.settings import ServerConfig

VARIABLE = "SPECDEC_API_KEY"


class Access:
    """What an operator has said of it. A wrong word is a `ConfigError`."""

    def __init__(self, config: ServerConfig) -> None:
        self._keys = [key.encode() for key in read_keys(config)]
        self._local = is_local(config.host)

    @property
    def is_open(self) -> bool:
        """Tell whether everybody may ask, from whatever machine."""
        return not self._keys and not self._local

    def admit(self, request: web.Request) -> None:
        """Let a request in or refuse it."""
        if self._keys:
            self._check_key(request.headers.get("Authorization", ""))
        else:
            self._refuse_pages(request.headers.get("Host", ""), request.headers.get("Origin"))

    def _check_key(self, header: str) -> None:
        """Compare all keys, each in a time that tells nothing."""
        kind, _, given = header.partition(" ")
        mine = given.strip().encode(errors="surrogateescape")
        matches = [hmac.compare_digest(mine, key) for key in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            raise Failure(
                401,
                "This server wants a key that it knows: send the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _refuse_pages(self, host: str, origin: str | None) -> None:
        """Refuse what a page from elsewhere has a browser send here, under a name of its own perhaps."""
        try:
            name, own = urlsplit(f"//{host}").hostname or "", origin and urlsplit(origin).netloc
        except ValueError:
            raise Failure(400, "Host or Origin: it is no address.") from None
        if own is not None and own.lower() != host.lower():
            raise Failure(
                403,
                f"Origin: a page of {origin:.80} may not ask this server, which wants no key; start it with "
                "--api-key to let those in that know one.",
                code="foreign_origin",
            )
        if host and self._local and not is_local(name):
            raise Failure(
                403,
                f"Host: {host:.80} is not what this machine calls itself; ask 127.0.0.1 or localhost, or "
                "start the server with --api-key, or with --host for others.",
                code="foreign_host",
            )


def is_local(host: str) -> bool:
    """Tell whether a name means this machine to itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".").rpartition(".")[2] == "localhost"


def read_keys(config: ServerConfig) -> Sequence[str]:
    """Collect the keys that an operator has given, wherever."""
    given: list[tuple[str, list[str]]] = []
    if config.api_key is not None:
        given.append(("api_key", config.api_key))
    if (own := os.environ.get(VARIABLE)) is not None:
        given.append((VARIABLE, [own]))
    if path := config.api_key_file:
        given.append((f"api_key_file: {path}", _lines(path)))
    for where, keys in given:
        if not keys or not all(key.strip() for key in keys):
            raise ConfigError(
                f"{where}: there is no key in it, which would let everybody in; give one, or leave it out.",
                field=where.partition(":")[0],
            )
    return [key.strip() for _, keys in given for key in keys]


def _lines(path: str) -> list[str]:
    """Read a file of keys, without blank lines and those that begin with #."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"api_key_file: {path} cannot be read ({error}); give a text file with one key on each line.",
            field="api_key_file",
        ) from error
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]
