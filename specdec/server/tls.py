"""TLS: the certificate that the server shows, read before the model is loaded."""

import logging
import math
import ssl
import time
from pathlib import Path
from typing import Protocol

from specdec.errors import ConfigError
from specdec.models.folder import short

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""Seconds between two log lines about clients that speak plain HTTP."""
PLAIN_HTTP = "HTTP_REQUEST"
"""OpenSSL's reason for a handshake that is a request in plain HTTP."""
MISMATCH = "KEY_VALUES_MISMATCH"
"""OpenSSL's reason for a key that is not the certificate's."""


class Files(Protocol):
    """The settings that name them."""

    @property
    def ssl_certfile(self) -> str | None: ...

    @property
    def ssl_keyfile(self) -> str | None: ...

    @property
    def ssl_keyfile_password(self) -> str | None: ...


def tls_context(config: Files) -> ssl.SSLContext | None:
    """Read the certificate and its key; None: the server speaks plain HTTP."""
    if config.ssl_certfile is None:
        for field in ("ssl_keyfile", "ssl_keyfile_password"):
            if getattr(config, field) is not None:
                raise _unfit(field, "there is no certificate to it; give --ssl-certfile too")
        return None
    for field in ("ssl_certfile", "ssl_keyfile"):
        _check_readable(field, getattr(config, field))
    asked: list[str] = []

    def password() -> str:
        # OpenSSL would ask at the terminal where there is none.
        asked.append(config.ssl_keyfile_password or "")
        return asked[-1]

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
    except (ssl.SSLError, ValueError) as error:
        raise _refusal(config, error, is_encrypted=bool(asked)) from None
    context.sslobject_class = _telling_plain_http()
    return context


def _telling_plain_http() -> type[ssl.SSLObject]:
    """Return the kind of connection that logs where a client speaks plain HTTP, now and then."""
    told_s = -math.inf

    class Telling(ssl.SSLObject):
        def do_handshake(self) -> None:
            nonlocal told_s
            try:
                super().do_handshake()
            except ssl.SSLError as error:
                if error.reason == PLAIN_HTTP and time.monotonic() - told_s >= QUIET_S:
                    told_s = time.monotonic()
                    logger.warning(
                        "a client speaks plain HTTP where this server speaks TLS; give it https://"
                    )
                raise

    return Telling


def _check_readable(field: str, path: str | None) -> None:
    if path is None:
        return
    try:
        Path(path).read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise _unfit(field, f"{short(path)} cannot be read ({why}); give a file in PEM") from None


def _refusal(config: Files, error: Exception, *, is_encrypted: bool) -> ConfigError:
    """Say which of the files is at fault, and what to give."""
    if is_encrypted:
        wrong = "does not open" if config.ssl_keyfile_password else "is missing for"
        return _unfit("ssl_keyfile_password", f"it {wrong} the key, which is encrypted; give the key's own")
    if getattr(error, "reason", None) == MISMATCH:
        return _unfit("ssl_keyfile", "the key is not that of the certificate; give the one it was made with")
    try:
        ssl.create_default_context().load_verify_locations(config.ssl_certfile)
    except ssl.SSLError:
        return _unfit("ssl_certfile", f"{short(config.ssl_certfile)} holds no certificate in PEM; give one")
    key = short(config.ssl_keyfile or config.ssl_certfile)
    return _unfit("ssl_keyfile", f"{key} holds no private key in PEM; give the file that does")


def _unfit(field: str, why: str) -> ConfigError:
    return ConfigError(f"{field}: {why}.", field=field)
