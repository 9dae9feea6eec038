"""TLS: load the certificate before the model."""

import logging
import math
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specdec.errors import ConfigError
from specdec.models.folder import short

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""Minimum seconds between log lines about plain HTTP clients."""
PLAIN_HTTP = "HTTP_REQUEST"
"""OpenSSL's reason for a plain HTTP request instead of a handshake."""
MISMATCH = "KEY_VALUES_MISMATCH"
"""OpenSSL's reason for a key that does not match the certificate."""
PIECE_BYTES = 1024
"""Bytes decrypted between two time checks: 38 KeyUpdate messages, 1.7 ms."""
ALLOWED_S, ALLOWED_PER_BYTE_S = 0.002, 1e-6
"""CPU seconds allowed for a connection's records without data, and per byte of data. Records of 100 bytes
take a tenth of that."""

T = TypeVar("T")


class TlsFiles(Protocol):
    """Settings that name the files."""

    @property
    def ssl_certfile(self) -> str | None: ...

    @property
    def ssl_keyfile(self) -> str | None: ...

    @property
    def ssl_keyfile_password(self) -> str | None: ...


def tls_context(config: TlsFiles) -> ssl.SSLContext | None:
    """Load the certificate and its key; None: plain HTTP."""
    if config.ssl_certfile is None:
        for field in ("ssl_keyfile", "ssl_keyfile_password"):
            if getattr(config, field) is not None:
                raise _config_error(field, "it needs a certificate; give --ssl-certfile too")
        return None
    for field in ("ssl_certfile", "ssl_keyfile"):
        _check_readable(field, getattr(config, field))
    passwords: list[str] = []

    def password() -> str:
        # Without this, OpenSSL would prompt at the terminal.
        passwords.append(config.ssl_keyfile_password or "")
        return passwords[-1]

    context = _TlsContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
    except (ssl.SSLError, ValueError) as error:
        raise _refusal(config, error, is_encrypted=bool(passwords)) from None
    return context


class _TlsSession(ssl.SSLObject):
    """One client's TLS session. It decrypts small pieces, and aborts if they take too long for their data.

    OpenSSL would process all buffered KeyUpdate messages in one call, 45 us each: 40 connections without a
    key halted all streams for a second.
    """

    incoming: ssl.MemoryBIO
    fed: ssl.MemoryBIO
    left_s = ALLOWED_S
    """Remaining CPU seconds before more data must arrive."""
    since_s = 0.0
    """Thread CPU time at which the current piece was fed; 0: none."""

    def do_handshake(self) -> None:
        """Continue the handshake; log plain HTTP clients at a limited rate."""
        try:
            self._feed(super().do_handshake)
            self.since_s = 0.0
        except ssl.SSLError as error:
            context = self.context
            assert isinstance(context, _TlsContext)
            if error.reason == PLAIN_HTTP and time.monotonic() - context.told_s >= QUIET_S:
                context.told_s = time.monotonic()
                logger.warning("a client speaks plain HTTP to a TLS server; use https://")
            raise

    def read(self, *args: Any) -> Any:
        """Decrypt data. asyncio calls it until none is left, so each piece is timed completely."""
        result = self._feed(partial(super().read, *args), self._take_time)
        size = result if isinstance(result, int) else len(result)
        self.left_s += size * ALLOWED_PER_BYTE_S
        return result

    def unwrap(self) -> Any:
        """Continue the shutdown."""
        return self._feed(super().unwrap, self._take_time)

    def _feed(self, operation: Callable[[], T], account: Callable[[], None] = lambda: None) -> T:
        """Run an operation that consumes records, feeding it in pieces."""
        while True:
            try:
                return operation()
            except ssl.SSLWantReadError:
                account()
                chunk = self.incoming.read(PIECE_BYTES)
                self.since_s = time.thread_time() if chunk else 0.0
                if not chunk:
                    raise
                self.fed.write(chunk)

    def _take_time(self) -> None:
        """Charge the CPU time of the last piece."""
        spent_s = time.thread_time() - self.since_s if self.since_s else 0.0
        # A garbage collection may fall into one piece; it alone must not end a connection.
        self.left_s = min(self.left_s, ALLOWED_S) - min(spent_s, ALLOWED_S / 2)
        if self.left_s < 0:
            raise ssl.SSLError("its TLS records take too much time for little data")


class _TlsContext(ssl.SSLContext):
    """Context whose sessions bound their decryption cost."""

    sslobject_class = _TlsSession
    told_s = -math.inf
    """Time at which a plain HTTP client was last logged."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, *args: Any, **kw: Any) -> ssl.SSLObject:
        """Return a session that reads `incoming` in small pieces."""
        fed = ssl.MemoryBIO()
        session = super().wrap_bio(fed, *args, **kw)
        assert isinstance(session, _TlsSession)
        session.incoming, session.fed = incoming, fed
        return session


def _check_readable(field: str, path: str | None) -> None:
    if path is None:
        return
    try:
        Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _config_error(field, f"{short(path)} cannot be read ({reason}); give a file in PEM") from None


def _refusal(config: TlsFiles, error: Exception, *, is_encrypted: bool) -> ConfigError:
    """Return the error that names the wrong file, and the remedy."""
    if is_encrypted:
        problem = "does not open" if config.ssl_keyfile_password else "is missing for"
        return _config_error(
            "ssl_keyfile_password", f"it {problem} the key, which is encrypted; give the key's own"
        )
    if getattr(error, "reason", None) == MISMATCH:
        return _config_error(
            "ssl_keyfile", "the key does not match the certificate; give the one it was made with"
        )
    try:
        ssl.create_default_context().load_verify_locations(config.ssl_certfile)
    except ssl.SSLError:
        return _config_error(
            "ssl_certfile", f"{short(config.ssl_certfile)} has no certificate in PEM; give one"
        )
    key = short(config.ssl_keyfile or config.ssl_certfile)
    return _config_error("ssl_keyfile", f"{key} has no private key in PEM; give the file that has it")


def _config_error(field: str, reason: str) -> ConfigError:
    return ConfigError(f"{field}: {reason}.", field=field)
