"""Bind, listen, and print the address; shared by all servers."""

import asyncio
import errno
import logging
import os
import socket
import ssl
import sys
from asyncio import sslproto
from collections.abc import Callable

from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

BACKLOG = 1024
"""Backlog of the listening socket."""
ACCEPTED = 16
"""Connections accepted per iteration of the event loop. With one, clients that connect and leave could fill
the backlog, and a new connection would wait for a thousand iterations (5.3 s beside requests for /metrics,
0.7 s with 16). Without free descriptors, asyncio logs an error for each of them."""
UNSENT_BYTES = 1 << 18
"""Send buffer of a connection; the system's default grows to megabytes."""
HANDSHAKE_S = 10.0
"""Maximum seconds of a TLS handshake."""
TLS_READ_BYTES = 1 << 15
"""Buffer of a TLS connection, allocated on accept. With asyncio's own 256 KiB 8,000 silent clients took 1.7
GB."""
SWITCH_S = 1e-3
"""Python's thread switch interval: the delay that one thread, such as a parser of a large body, causes
others."""


async def listen(
    factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.Server, str]:
    """Accept connections on a bound socket; return the server and its address.

    With TLS it sets the buffer size of all TLS connections of the process.
    """
    if tls:
        sslproto.SSLProtocol.max_size = TLS_READ_BYTES
    listener = await asyncio.get_running_loop().create_server(
        factory, sock=sock, backlog=ACCEPTED, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S if tls else None
    )
    sock.listen(BACKLOG)
    host, port = sock.getsockname()[:2]
    scheme = "https" if tls else "http"
    return listener, f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def say(line: str) -> None:
    """Print a line; if that fails, on a full disk for example, continue."""
    try:
        print(line, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written: %s", error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # also drops Python's buffered output


def bind(host: str, port: int, prefix: str = "") -> socket.socket:
    """Bind the address; connections are accepted later, by `listen`. `prefix` begins the settings' names."""
    sock = None
    remedy = "give one of its addresses" if prefix else "give 127.0.0.1, or 0.0.0.0 for all of its addresses"
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)  # accepted connections inherit it
        sock.bind(address)
    except socket.gaierror as error:
        raise ConfigError(
            f"{prefix}host: {host!r} is neither an address nor a known name ({error.strerror}); {remedy}.",
            field=f"{prefix}host",
        ) from error
    except OSError as error:
        if sock:
            sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{prefix}host: {host} is not an address of this machine; {remedy}.", field=f"{prefix}host"
            ) from error
        if error.errno == errno.EADDRINUSE:
            option = f"--{prefix}port".replace("_", "-")
            raise ConfigError(
                f"{prefix}port: port {port} is in use at {host}; choose another one with `{option} N` "
                "(0: any free port), or stop the server that uses it.",
                field=f"{prefix}port",
            ) from error
        raise ConfigError(
            f"{prefix}port: {host}:{port} cannot be bound ({error.strerror or error}); choose "
            "another one, or 0 for any that is free.",
            field=f"{prefix}port",
        ) from error
    return sock
