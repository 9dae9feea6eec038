"""Notify systemd that the server is ready or stopping: sd_notify's protocol."""

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"
READY, STOPPING = "READY=1", "STOPPING=1"


def tell_supervisor(state: str) -> None:
    """Send the state to the socket named by the environment, if any."""
    address = os.environ.get(VARIABLE, "")
    if not address:
        return
    # A name that begins with @ is in the kernel's namespace, not a file.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
