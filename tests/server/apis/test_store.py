"""Stored responses stay within their limits, and callers do not affect each other."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from specdec.server.failures import Failure
from specdec.server.receive import BodyBudget, HeldBody
from specdec.server.responses.bodies import ResponseBody
from specdec.server.responses.handlers import retrieve
from specdec.server.responses.store import OVERHEAD, ResponseStore, StoredResponse


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def store(most: int = 100, most_bytes: int = 1 << 20, keep_s: float = 10.0) -> tuple[ResponseStore, Clock]:
    clock = Clock()
    return ResponseStore(most, most_bytes, keep_s, clock), clock


def entry(previous: str | None = None, size: int = 8) -> StoredResponse:
    return StoredResponse(b"x" * (size // 2), b"y" * (size - size // 2), previous)


def held(own: ResponseStore, caller: str, names: str) -> str:
    """Return which of the names a caller's store still has, without using them."""
    shelf = own._by_caller.get(caller)
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


def test_active_conversations_outlive_idle_ones() -> None:
    own, _ = store(most=4)
    own.put("", "a", entry())
    own.put("", "b", entry("a"))
    own.put("", "p", entry())
    own.put("", "q", entry("p"))
    assert [stored.previous for stored in own.history("", "b")] == [None, "a"]
    own.put("", "c", entry("b"))
    assert held(own, "", "abcpq") == "abcp"  # the chain's end is evicted first: p can still be continued
    own.put("", "d", entry("c"))
    assert held(own, "", "abcdpq") == "abcd"


def test_unused_responses_expire_and_used_ones_do_not() -> None:
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
    assert own.count == 1 and "" not in own._by_caller


def test_nothing_is_stored_with_a_limit_of_zero() -> None:
    own, _ = store(most=0)
    own.put("", "a", entry())
    with pytest.raises(Failure, match="none are stored"):
        own.get("", "a")


class Asked(dict[str, Any]):
    """A request for a stored response."""

    def __init__(self, held: HeldBody, name: str) -> None:
        super().__init__(caller=held.caller, kept=held)
        self.query, self.match_info = {"stream": "false"}, {"name": name}


def test_stored_responses_being_sent_count_as_their_callers_memory() -> None:
    """Each client that does not read it has a copy."""
    own, _ = store()
    own.put("alice", "a", entry(size=40_000))
    state: Any = SimpleNamespace(responses=own)
    budget = BodyBudget(1_000_000, 1000)

    def hold(caller: str) -> HeldBody:
        return budget.holding(caller).__enter__()

    async def ask(caller: str) -> int:
        held = hold(caller)
        request: Any = Asked(held, "a")
        await retrieve(request, state)
        return held.num_bytes

    async def ask_often(caller: str) -> None:
        for _ in range(50):
            await ask(caller)

    assert asyncio.run(ask("alice")) == 20_000
    with pytest.raises(Failure) as refused:
        asyncio.run(ask_often("alice"))
    assert refused.value.status == 429 and budget.held_bytes <= 500_000
    hold("bob").add(20_000)


def test_of_much_metadata_one_mistake_is_collected() -> None:
    with pytest.raises(ValidationError) as refused:
        ResponseBody.model_validate({"input": "a", "metadata": {str(i): i for i in range(1000)}})
    assert refused.value.error_count() == 1
