"""Allow-list of peers: the only addresses that this server sends requests to."""

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

from specdec.errors import ConfigError
from specdec.reach.protocol import ReachError

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.(?!-)[a-z0-9_-]{1,63})*", re.ASCII)
ENTRY = re.compile(
    r"\[(?P<inside>[^\[\]]+)\](:(?P<port>[0-9]{1,5}))?|(?P<plain>[^:]+)(:(?P<own>[0-9]{1,5}))?"
)
MOST_HOST = 253


class Endpoint(NamedTuple):
    """Normalised address of a peer's side channel."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AllowedPeers:
    """Allowed networks, addresses and host names, each with its side channel's port.

    Requests are sent to whatever listens there, so an entry allows one port: its own or the default.
    """

    def __init__(self, entries: Sequence[str], port: int) -> None:
        self._networks: list[tuple[IPNetwork, int]] = []
        self._names: set[Endpoint] = set()
        for entry in entries:
            for part in entry.split(","):
                self._add(part, port)

    def endpoint(self, host: str, port: int) -> Endpoint:
        """Return the endpoint of a request's host and port, if allowed; performs no DNS look-up."""
        address, name = _address(host), host.lower().removesuffix(".")
        if address is not None:
            if any(port == network_port and address in network for network, network_port in self._networks):
                return Endpoint(str(address), port)
        elif Endpoint(name, port) in self._names:
            return Endpoint(name, port)
        raise ReachError(
            "not_allowed",
            f"reach_peers: {host!r:.80} with port {port} is not among them; start this server with it, as in "
            "--reach-peers 10.0.0.0/8,prefill.example:5600.",
            field="reach_peers",
        )

    def _add(self, entry: str, default_port: int) -> None:
        text = entry.strip().lower().removesuffix(".")
        match = None if _network(text) else ENTRY.fullmatch(text)
        host = (match["inside"] or match["plain"]) if match else text
        port = int((match["port"] or match["own"] or default_port) if match else default_port)
        network = _network(host)
        if port > 65535 or not (network or _is_name(host)):
            raise ConfigError(
                f"reach_peers: {entry!r:.80} is not a peer; give a network such as 10.0.0.0/8, an address or "
                "a host name, followed by a colon and the port if it is not reach_port: [fd00::/8]:5601.",
                field="reach_peers",
            )
        if network:
            self._networks.append((network, port))
        else:
            self._names.add(Endpoint(host, port))


def _address(host: str) -> IPAddress | None:
    """Parse an address to its canonical form; None for host names and scoped addresses.

    `localhost` is 127.0.0.1: a resolver may return ::1 first, where another user may listen.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host.lower() == "localhost" else host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or (None if address.scope_id else address)
    return address


def _network(text: str) -> IPNetwork | None:
    try:
        return ipaddress.ip_network("127.0.0.1" if text == "localhost" else text)
    except ValueError:
        return None


def _is_name(host: str) -> bool:
    """Return whether this is a host name; unusual address notations that only some programs parse are not."""
    last = host.rpartition(".")[2]
    return len(host) <= MOST_HOST and bool(NAME.fullmatch(host)) and not re.match(r"[0-9]+$|0x", last)
