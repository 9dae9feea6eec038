"""Stored responses stay within their bounds, and no caller's cost another's."""

import pytest

from specdec.server.failures import Failure
from specdec.server.responses.store import OVERHEAD, ResponseStore, Stored


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def store(most: int = 100, most_bytes: int = 1 << 20, keep_s: float = 10.0) -> tuple[ResponseStore, Clock]:
    clock = Clock()
    return ResponseStore(most, most_bytes, keep_s, clock), clock


def entry(previous: str | None = None, size: int = 8) -> Stored:
    return Stored(b"x" * (size // 2), b"y" * (size - size // 2), previous)


def held(own: ResponseStore, caller: str, names: str) -> str:
    """Return which of the names a caller's store still has, without using them."""
    shelf = own._shelves.get(caller)
    return "".join(name for name in names if shelf and name in shelf.entries)


def test_the_caller_that_has_most_loses_first() -> None:
    own, _ = store(most=4)
    for name in "abc":
        own.put("alice", name, entry())
    for name in "xyz":
        own.put("bob", name, entry())
    assert (held(own, "alice", "abc"), held(own, "bob", "xyz")) == ("bc", "yz")
    own, _ = store(most_bytes=2 * OVERHEAD + 100)
    own.put("alice", "a", entry(size=90))
    own.put("bob", "x", entry())
    own.put("bob", "y", entry())  # bob has less, until his second
    assert own.size <= own.most_bytes and own.count == 2
    own.put("bob", "z", entry(size=own.most_bytes))
    assert not held(own, "bob", "z")


def test_a_conversation_that_goes_on_outlives_those_that_do_not() -> None:
    own, _ = store(most=4)
    own.put("", "a", entry())
    own.put("", "b", entry("a"))
    own.put("", "p", entry())
    own.put("", "q", entry("p"))
    assert [stored.previous for stored in own.history("", "b")] == [None, "a"]
    own.put("", "c", entry("b"))
    assert held(own, "", "abcpq") == "abcp"  # its end goes first: p can still be gone on from
    own.put("", "d", entry("c"))
    assert held(own, "", "abcdpq") == "abcd"


def test_what_is_not_used_expires_and_what_is_used_does_not() -> None:
    own, clock = store()
    own.put("", "a", entry())
    own.put("", "b", entry("a"))
    own.put("", "x", entry())
    clock.now_s = 8
    own.history("", "b")
    clock.now_s = 11
    with pytest.raises(Failure) as caught:
        own.get("", "x")
    assert caught.value.status == 404 and held(own, "", "abx") == "ab"
    own.delete("", "a")
    with pytest.raises(Failure, match="'a'") as caught:
        own.history("", "b")
    assert caught.value.param == "previous_response_id"
    clock.now_s = 30
    own.put("other", "y", entry())
    assert own.count == 1 and "" not in own._shelves


def test_nothing_is_kept_where_nothing_may_be() -> None:
    own, _ = store(most=0)
    own.put("", "a", entry())
    with pytest.raises(Failure, match="none are stored"):
        own.get("", "a")
