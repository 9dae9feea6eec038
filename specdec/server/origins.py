"""Cross-origin access: which pages may send requests and read responses (CORS); others are refused."""

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from aiohttp import web

from specdec.errors import ConfigError
from specdec.server.failures import Failure
from specdec.server.fields import IGNORED, MAX_TOKENS

ANY = "*"
ORIGIN = re.compile(r"([a-z][a-z0-9+.\-]*)://[^\s/?#@,]+")
PORTS = {"http": ":80", "https": ":443"}
"""Default ports, which browsers omit."""
EXPOSED = f"X-Request-ID, Request-ID, Retry-After, {IGNORED}, {MAX_TOKENS}"
"""Response headers exposed to pages, besides the safelisted ones."""
NAMES = re.compile(r"[\w\-, ]{1,2000}", re.ASCII)
METHODS = "GET, HEAD, POST, DELETE"
KEPT_S = "600"
"""Seconds a browser may cache a preflight."""


class Origins:
    """The allowed origins. Raises `ConfigError` for malformed ones."""

    def __init__(self, allowed: Sequence[str] | None) -> None:
        self._allowed = frozenset(map(_read, allowed or ()))

    @property
    def takes_any(self) -> bool:
        """Return whether every origin is allowed."""
        return ANY in self._allowed

    def allow(self, origin: str) -> bool:
        return self.takes_any or origin.lower() in self._allowed

    def name_host(self, host: str) -> bool:
        """Return whether a Host header names an allowed origin, as behind a proxy that forwards it."""
        return any(f"{scheme}://{host.lower()}" in self._allowed for scheme in PORTS)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers that let a page of this origin read a response, if allowed."""
        if not self._allowed:
            return {}
        if self.takes_any:
            return {"Access-Control-Allow-Origin": ANY, "Access-Control-Expose-Headers": EXPOSED}
        headers = {"Vary": "Origin"}  # caches must not serve one origin's response to another
        if origin is not None and self.allow(origin):
            headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
        return headers


class PageGuard:
    """Refuses requests that pages of other origins send, DNS rebinding included."""

    def __init__(self, origins: Origins, host: str) -> None:
        self._origins, self._is_local = origins, is_local(host)

    def check(self, request: web.Request) -> None:
        """Raise a `Failure` if a foreign page sent the request."""
        self.refuse(request.headers.get("Host", ""), request.headers.get("Origin"))

    def refuse(self, host: str, origin: str | None) -> None:
        """Raise a `Failure` if the Origin is foreign, or the Host is not this machine."""
        try:
            name, origin_host = urlsplit(f"//{host}").hostname or "", urlsplit(origin or "").netloc
        except ValueError:
            raise Failure(400, "Host or Origin: it is not an address.") from None
        if origin is not None and origin_host.lower() != host.lower() and not self._origins.allow(origin):
            raise foreign(origin)
        if host and self._is_local and not is_local(name) and not self._origins.name_host(host):
            raise Failure(
                403,
                f"Host: {host:.80} is not a name of this machine; use 127.0.0.1 or localhost, or start "
                "the server with --host; `specdec serve` takes --allowed-origins "
                f"https://{host:.80} too.",
                code="foreign_host",
            )


def foreign(origin: str) -> Failure:
    """Return the error for a foreign page."""
    return Failure(
        403,
        f"Origin: a page of {origin:.80} may not use this server; to allow it, start the server with "
        "--allowed-origins and this origin.",
        code="foreign_origin",
    )


def is_local(host: str) -> bool:
    """Return whether a host name is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".").rpartition(".")[2] == "localhost"


def is_preflight(request: web.Request) -> bool:
    """Return whether a request is a CORS preflight, which carries no key."""
    has_headers = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    return request.method == "OPTIONS" and has_headers


def let_through(request: web.Request) -> web.Response:
    """Answer a preflight, allowing the headers it names."""
    headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": KEPT_S}
    names = request.headers.get("Access-Control-Request-Headers", "")
    if NAMES.fullmatch(names):  # clients send many custom headers; the key decides what they may do
        headers["Access-Control-Allow-Headers"] = names
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


def _read(value: str) -> str:
    """Normalise an origin as browsers write it."""
    origin = value.strip().lower()
    match = ORIGIN.fullmatch(origin)
    if origin != ANY and not match:
        raise ConfigError(
            f"allowed_origins: {value!r:.80} is not an origin; give scheme, host and port such as "
            "https://app.example:8443, without a path, or * for all.",
            field="allowed_origins",
        )
    return origin.removesuffix(PORTS.get(match[1], "\0")) if match else origin
