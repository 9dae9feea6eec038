"""Authorization: requests with a valid key or, where no key is set, those that no foreign page sent."""

import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from specdec.config.tenant import Tenant
from specdec.errors import ConfigError
from specdec.models.folder import short
from specdec.server.failures import Failure
from specdec.server.origins import Origins, PageGuard, foreign, is_local
from specdec.server.settings import ServerConfig

VARIABLE = "SPECDEC_API_KEY"


class Grant(NamedTuple):
    """Options of an API key."""

    weight: float = 1.0
    """Of its share of the engine; others have 1."""
    max_queued: int | None = None
    """Choices that it may have under way or waiting; None: a fair share of the server's `max_queued`."""


class Access:
    """The operator's settings. A malformed one is a `ConfigError`."""

    def __init__(self, config: ServerConfig) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = {self._caller(key.encode()): grant for key, grant in read_keys(config).items()}
        """By a name for each key: what is stored of a request carries the name, never the key."""
        self._local = is_local(config.host)
        self.origins = Origins(config.allowed_origins)
        self._guard = PageGuard(self.origins, config.host)

    @property
    def is_open(self) -> bool:
        """Tell whether the server is open: no key is required, from any machine."""
        return not self._keys and not self._local

    @property
    def is_open_to_pages(self) -> bool:
        """Tell whether pages of every origin may send requests."""
        return not self._keys and self.origins.takes_any

    def admit(self, request: web.Request, *, needs_key: bool = True) -> Tenant:
        """Refuse a request, or return its tenant: the caller is a name of its key, if one is required.

        Requests that need no key are refused if a page of another origin sent them, as there is no key to
        tell that it may.
        """
        if self._keys and needs_key:
            headers = request.headers
            return self._check_key(headers.get("Authorization", ""), headers.get("x-api-key", ""))
        self._guard.check(request)
        return Tenant(source=_connection(request))

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def weight(self, caller: str) -> float:
        """Return the weight of a caller's share."""
        return self._keys[caller].weight if caller in self._keys else 1.0

    def max_queued(self, caller: str) -> int | None:
        """Return how many choices a caller may have under way, if its key says so."""
        return self._keys[caller].max_queued if caller in self._keys else None

    def admit_preflight(self, request: web.Request) -> None:
        """Admit a CORS preflight, which never carries a key, or refuse it."""
        host, origin = request.headers.get("Host", ""), request.headers["Origin"]
        if not self._keys:
            self._guard.refuse(host, origin)
        elif not self.origins.allow(origin):
            raise foreign(origin)

    def _check_key(self, authorization: str, bare: str) -> Tenant:
        """Compare all keys, each in constant time, which does not even leak a key's length."""
        kind, _, bearer = authorization.partition(" ")
        given = [bearer] if kind.lower() == "bearer" else []
        mine = [self._caller(key.strip().encode(errors="surrogateescape")) for key in (*given, bare)]
        matches = [name for own in mine for name in self._keys if hmac.compare_digest(own, name)]
        if not matches:
            raise Failure(
                401,
                "This server wants a key that it knows: send the header 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return Tenant(matches[0], weight=self.weight(matches[0]))

    def _caller(self, key: bytes) -> str:
        """Name the holder of a key, as this process alone does."""
        return hmac.digest(self._secret, key, "sha256").hex()


def _connection(request: web.Request) -> str:
    peer = request.transport and request.transport.get_extra_info("peername")
    return repr(peer) if peer else ""


def read_keys(config: ServerConfig) -> Mapping[str, Grant]:
    """Collect the keys from the settings, the environment and the key file."""
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
                f"{where}: there is no key in it, so every client would be let in; give one, or omit it.",
                field=where.partition(":")[0],
            )
    found: dict[str, Grant] = {}
    for where, lines in given:
        for number, line in enumerate(lines, 1):
            key, grant = _read_key(line, where)
            if found.setdefault(key, grant) != grant:
                raise ConfigError(
                    f"{where}: key {number} was given before, with other options; keep one of the two.",
                    field=where.partition(":")[0],
                )
    return found


def _read_key(given: str, where: str) -> tuple[str, Grant]:
    """Read a key and what stands behind it."""
    key, *options = given.split()
    found = {name: value for name, _, value in (option.partition("=") for option in options)}
    try:
        if found.keys() - {"weight", "max_queued"} or len(found) < len(options):
            raise ValueError
        most = int(found["max_queued"]) if "max_queued" in found else None
        weight = float(found.get("weight", 1))
        if not (0.01 <= weight <= 100 and (most is None or most > 0)):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{where}: what follows a key is not understood; give 'KEY weight=2 max_queued=64' or less: "
            "weight, 0.01 to 100, is its share of the engine, max_queued its choices under way; KEY has no "
            "spaces.",
            field=where.partition(":")[0],
        ) from None
    return key, Grant(weight, most)


def _lines(path: str) -> list[str]:
    """Read a file of keys, skipping blank lines and comments."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"api_key_file: {short(path)} cannot be read ({why}); give a text file with a key on each line.",
            field="api_key_file",
        ) from error
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]
