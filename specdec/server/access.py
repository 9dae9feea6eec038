"""Authorization: requests with a valid key or, if no key is set, those not sent by a foreign page."""

import hmac
import os
import secrets
from collections.abc import Sequence
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
    """Weight of its share of the engine; the default is 1."""
    max_queued: int | None = None
    """Choices that it may have in flight or waiting; None: a fair share of the server's `max_queued`."""


OPTIONS = frozenset(Grant._fields)


class Access:
    """API keys and origins from the settings. Raises `ConfigError` for malformed ones."""

    def __init__(self, config: ServerConfig) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = {self._caller(key.encode()): grant for key, grant in read_keys(config).items()}
        """Grants by caller name; only this name of a key is stored with requests, never the key."""
        self._local = is_local(config.host)
        self.origins = Origins(config.allowed_origins)
        self._guard = PageGuard(self.origins, config.host)

    @property
    def is_open(self) -> bool:
        """Return whether the server is open: no key is required, from any machine."""
        return not self._keys and not self._local

    @property
    def is_for_one(self) -> bool:
        """Whether all admitted requests belong to one caller: the only key, or local clients without keys."""
        return len(self._keys) == 1 or (not self._keys and self._local)

    @property
    def is_open_to_pages(self) -> bool:
        """Return whether pages of every origin may send requests."""
        return not self._keys and self.origins.takes_any

    def admit(self, request: web.Request, *, needs_key: bool = True) -> Tenant:
        """Return a request's tenant, or raise; with keys, the caller is a name derived from the key.

        Requests that need no key are refused if a page of another origin sent them.
        """
        if self._keys and needs_key:
            headers = request.headers
            return self._check_key(headers.get("Authorization", ""), headers.get("x-api-key", ""))
        self._guard.check(request)
        return Tenant(source=_connection(request))

    def weight(self, caller: str) -> float:
        """Return the weight of a caller's share."""
        return self._keys[caller].weight if caller in self._keys else 1.0

    def max_choices(self, caller: str, free: int) -> int:
        """Return how many choices a caller may have in flight, of the number that the others leave free.

        This is its key's limit, or else the number, by weight, that then stays free for others, and at least
        one: the first caller gets half of the queue and the next half of the rest, so another key always
        finds capacity.
        """
        grant = self._keys.get(caller, Grant())
        if grant.max_queued is not None:
            return min(grant.max_queued, free)
        return max(1, int(self.share(caller) * free))

    def share(self, caller: str) -> float:
        """Return the fraction of a resource that a caller may hold; 1 unless there are several keys."""
        weight = self.weight(caller)
        return 1.0 if len(self._keys) < 2 else weight / (1 + weight)

    def admit_preflight(self, request: web.Request) -> None:
        """Admit a CORS preflight, which never carries a key, or refuse it."""
        host, origin = request.headers.get("Host", ""), request.headers["Origin"]
        if not self._keys:
            self._guard.refuse(host, origin)
        elif not self.origins.allow(origin):
            raise foreign(origin)

    def _check_key(self, authorization: str, bare: str) -> Tenant:
        """Return the tenant of a valid key. All keys are compared, each in constant time."""
        kind, _, bearer = authorization.partition(" ")
        tokens = [bearer] if kind.lower() == "bearer" else []
        candidates = [self._caller(key.strip().encode(errors="surrogateescape")) for key in (*tokens, bare)]
        matches = [
            name for candidate in candidates for name in self._keys if hmac.compare_digest(candidate, name)
        ]
        if not matches:
            raise Failure(
                401,
                "This server requires a valid API key: send the header 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return Tenant(matches[0], weight=self.weight(matches[0]))

    def _caller(self, key: bytes) -> str:
        """Return a caller name for a key, which only this process can compute."""
        return hmac.digest(self._secret, key, "sha256").hex()


def _connection(request: web.Request) -> str:
    peer = request.transport and request.transport.get_extra_info("peername")
    return repr(peer) if peer else ""


def read_keys(config: ServerConfig) -> dict[str, Grant]:
    """Return the keys of the settings, the environment and the key file."""
    sources: list[tuple[str, Sequence[tuple[str, str]]]] = []
    if config.api_key is not None:
        sources.append(("api_key", [("api_key", key) for key in config.api_key]))
    if (value := os.environ.get(VARIABLE)) is not None:
        sources.append((VARIABLE, [(VARIABLE, value)]))
    if path := config.api_key_file:
        sources.append((f"api_key_file: {path}", _lines(path)))
    grants: dict[str, Grant] = {}
    for source, lines in sources:
        if not lines or not all(line.strip() for _, line in lines):
            raise _wrong(source, "it has no key, so every client would be admitted; give one, or omit it.")
        for where, line in lines:
            key, grant = _read_key(line, where)
            if grants.setdefault(key, grant) != grant:
                raise _wrong(where, "this key is given twice, with different options; remove one.")
    return grants


def _read_key(entry: str, where: str) -> tuple[str, Grant]:
    key, *options = entry.split()
    values = {name: value for name, _, value in (option.partition("=") for option in options)}
    try:
        if values.keys() - OPTIONS or len(values) < len(options) or key.partition("=")[0] in OPTIONS:
            raise ValueError
        max_queued = int(values["max_queued"]) if "max_queued" in values else None
        weight = float(values.get("weight", 1))
        if not (0.01 <= weight <= 100 and (max_queued is None or max_queued > 0)):
            raise ValueError
    except ValueError:
        raise _wrong(
            where,
            "expected 'KEY', 'KEY weight=2', 'KEY max_queued=64' or both options: weight, from 0.01 to 100, "
            "is the key's share of the engine, max_queued the most choices it may have in flight; a KEY has "
            "no spaces.",
        ) from None
    return key, Grant(weight, max_queued)


def _wrong(where: str, reason: str) -> ConfigError:
    return ConfigError(f"{where}: {reason}", field=where.partition(":")[0])


def _lines(path: str) -> list[tuple[str, str]]:
    """Return the lines of a key file with their location, skipping blank lines and comments."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"api_key_file: {short(path)} cannot be read ({reason}); give a text file "
            "with a key on each line.",
            field="api_key_file",
        ) from error
    return [
        (f"api_key_file: {path}, line {number}", line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
