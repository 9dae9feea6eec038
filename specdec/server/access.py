"""Authorization: requests with a valid key or, where no key is set, those that no foreign page sent."""

import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from specdec.errors import ConfigError
from specdec.models.folder import short
from specdec.server.failures import Failure
from specdec.server.origins import Origins, PageGuard, foreign, is_local
from specdec.server.settings import ServerConfig

VARIABLE = "SPECDEC_API_KEY"


class Access:
    """The operator's settings. A malformed one is a `ConfigError`."""

    def __init__(self, config: ServerConfig) -> None:
        self._secret = secrets.token_bytes(32)
        self._callers = [self._caller(key.encode()) for key in read_keys(config)]
        """A name for each key: what is stored of a request carries the name, never the key."""
        self._local = is_local(config.host)
        self.origins = Origins(config.allowed_origins)
        self._guard = PageGuard(self.origins, config.host)

    @property
    def is_open(self) -> bool:
        """Tell whether the server is open: no key is required, from any machine."""
        return not self._callers and not self._local

    @property
    def is_open_to_pages(self) -> bool:
        """Tell whether pages of every origin may send requests."""
        return not self._callers and self.origins.takes_any

    def admit(self, request: web.Request, *, needs_key: bool = True) -> str:
        """Refuse a request, or return its caller: a name for each key, or none if no key is required.

        Requests that need no key are refused if a page of another origin sent them, as there is no key to
        tell that it may.
        """
        if self._callers and needs_key:
            headers = request.headers
            return self._check_key(headers.get("Authorization", ""), headers.get("x-api-key", ""))
        self._guard.check(request)
        return ""

    def admit_preflight(self, request: web.Request) -> None:
        """Admit a CORS preflight, which never carries a key, or refuse it."""
        host, origin = request.headers.get("Host", ""), request.headers["Origin"]
        if not self._callers:
            self._guard.refuse(host, origin)
        elif not self.origins.allow(origin):
            raise foreign(origin)

    def _check_key(self, authorization: str, bare: str) -> str:
        """Compare all keys, each in constant time, which does not even leak a key's length."""
        kind, _, bearer = authorization.partition(" ")
        given = [bearer] if kind.lower() == "bearer" else []
        mine = [self._caller(key.strip().encode(errors="surrogateescape")) for key in (*given, bare)]
        matches = [own for own in mine for caller in self._callers if hmac.compare_digest(own, caller)]
        if not matches:
            raise Failure(
                401,
                "This server wants a key that it knows: send the header 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return matches[0]

    def _caller(self, key: bytes) -> str:
        """Name the holder of a key, as this process alone does."""
        return hmac.digest(self._secret, key, "sha256").hex()


def read_keys(config: ServerConfig) -> Sequence[str]:
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
    return [key.strip() for _, keys in given for key in keys]


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
