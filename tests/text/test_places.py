"""The order in which callers get grammar compile slots under contention."""

import threading
import time

from specdec.text.grammar.places import Places

LONG_S = 30.0


def wait_for(places: Places, caller: str, order: list[str]) -> threading.Thread:
    """Wait for a slot in another thread, queued after the current waiters."""

    def take() -> None:
        assert places.take(caller, LONG_S)
        order.append(caller)

    before = len(places._waiting)
    thread = threading.Thread(target=take)
    thread.start()
    while len(places._waiting) == before and thread.is_alive():
        time.sleep(0.001)
    return thread


def test_one_caller_never_has_all_places() -> None:
    places = Places(3, 2)
    assert places.take("bob", 0.0) and places.take("bob", 0.0) and not places.take("bob", 0.0)
    assert places.take("alice", 0.0) and not places.take("carol", 0.0)


def test_the_caller_with_fewest_slots_is_next_then_the_earliest() -> None:
    places, order = Places(3, 2), list[str]()
    assert places.take("bob", 0.0) and places.take("bob", 0.0) and places.take("dan", 0.0)
    waiting = [wait_for(places, caller, order) for caller in ("bob", "carol", "alice")]
    for count, caller in enumerate(("dan", "carol", "bob"), start=1):
        places.give_back(caller)
        while len(order) < count:
            time.sleep(0.001)
    for thread in waiting:
        thread.join(LONG_S)
    assert order == ["carol", "alice", "bob"]


def test_a_cancelled_waiter_blocks_no_other() -> None:
    places = Places(1, 1)
    assert places.take("bob", 0.0) and not places.take("alice", 0.01)
    places.give_back("bob")
    assert places.take("carol", 0.0)
