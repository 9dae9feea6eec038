"""Addresses in requests are neither connected to nor resolved unless the operator allows them."""

import pytest

from specdec.errors import ConfigError
from specdec.reach.allowed_peers import AllowedPeers
from specdec.reach.protocol import ReachError

ALLOWED = AllowedPeers(
    ["10.1.0.0/16", "192.168.0.7:7000", "[fd00::/8]:5601", "fe80::/10", "Prefill-1.example.", "p2:81"], 5600
)


@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        ("10.1.2.3", 5600, "10.1.2.3:5600"),
        ("::ffff:10.1.2.3", 5600, "10.1.2.3:5600"),
        ("192.168.0.7", 7000, "192.168.0.7:7000"),
        ("FD00:0:0::1", 5601, "[fd00::1]:5601"),
        ("prefill-1.EXAMPLE", 5600, "prefill-1.example:5600"),
        ("prefill-1.example.", 5600, "prefill-1.example:5600"),
        ("P2", 81, "p2:81"),
    ],
)
def test_endpoints_are_normalised(host: str, port: int, endpoint: str) -> None:
    assert str(ALLOWED.endpoint(host, port)) == endpoint


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("10.2.0.1", 5600),
        ("10.1.2.3", 5601),
        ("10.1.2.3", 22),
        ("192.168.0.7", 5600),
        ("fd00::1", 5600),
        ("fe80::1%eth0", 5600),
        ("::ffff:127.0.0.1", 5600),
        ("127.0.0.1", 5600),
        ("localhost", 5600),
        ("169.254.169.254", 80),
        ("0x0a010203", 5600),
        ("10.1.515", 5600),
        ("010.001.002.003", 5600),
        ("167838211", 5600),
        ("10.1.2.3:5600", 5600),
        ("10.1.2.3@evil", 5600),
        ("evil/10.1.2.3", 5600),
        ("10.1.2.3#", 5600),
        ("10.1.2.3 ", 5600),
        ("10.1.2.3\r\nX: y", 5600),
        ("10.1.2.3\0", 5600),
        ("１０.1.2.3", 5600),
        ("prefill-1.example.evil", 5600),
        ("evil.prefill-1.example", 5600),
        ("prefill-1.example..", 5600),
        ("p2", 5600),
        ("", 5600),
        (".", 5600),
        ("a" * 100_000, 5600),
        ("\udcff", 5600),
    ],
)
def test_all_else_is_refused_by_the_name_of_the_setting(host: str, port: int) -> None:
    with pytest.raises(ReachError, match="reach_peers") as caught:
        ALLOWED.endpoint(host, port)
    assert caught.value.reason == "not_allowed" and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "entry",
    [
        "",
        " ",
        "10.0.0.1/8",
        "10.0.0.0/33",
        "a b",
        "-a",
        "a:",
        "a:99999",
        "0x7f.1",
        "1.2.3",
        "1.2.3.4.5",
        "[::1",
        "a/b",
        "http://a",
    ],
)
def test_an_entry_that_is_no_peer_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"reach_peers.*10\.0\.0\.0/8"):
        AllowedPeers([entry], 5600)


def test_entries_may_stand_between_commas() -> None:
    allowed = AllowedPeers(["10.1.0.0/16, p2:81,[fd00::/8]:5601"], 5600)
    assert str(allowed.endpoint("p2", 81)) == "p2:81" and allowed.endpoint("fd00::1", 5601)
    assert str(allowed.endpoint("10.1.2.3", 5600)) == "10.1.2.3:5600"


@pytest.mark.parametrize("entry", ["127.0.0.1", "localhost"])
def test_localhost_is_one_address(entry: str) -> None:
    """A resolver may return ::1 first, where another user of the machine may listen."""
    allowed = AllowedPeers([entry], 5600)
    assert str(allowed.endpoint("LocalHost", 5600)) == str(allowed.endpoint("127.0.0.1", 5600))
    assert str(allowed.endpoint("localhost", 5600)) == "127.0.0.1:5600"
    with pytest.raises(ReachError):
        allowed.endpoint("::1", 5600)


def test_without_entries_nothing_is_allowed() -> None:
    with pytest.raises(ReachError):
        AllowedPeers([], 5600).endpoint("127.0.0.1", 5600)
