"""One key floods a server; another's short request does not wait for it."""

import threading
from collections.abc import Callable

import pytest

from tests.selection import EXHAUSTIVE
from tests.server.live import Live, total

KEYS = ("--api-key", "alice", "--api-key", "bob", "--max-running", "32")
PATH = "/v1/completions"


def order_of_answers(entry: str) -> list[str]:
    """Alice requests twice what may run, then Bob eight tokens; return the order in which they end."""
    ended: list[str] = []
    with Live(*KEYS, entry=entry) as live:

        def ask(key: str, **body: object) -> None:
            asked = {"prompt": "def f(x):", "ignore_eos": True, "temperature": 1.0, **body}
            assert live.ask(PATH, asked, Authorization=f"Bearer {key}").status == 200
            ended.append(key)

        def begin(work: Callable[[], None]) -> threading.Thread:
            thread = threading.Thread(target=work)
            thread.start()
            return thread

        floods = [begin(lambda: ask("alice", n=32, max_tokens=200)) for _ in range(2)]
        while not total(live.metrics(), "vllm:num_requests_waiting"):
            pass
        ask("bob", max_tokens=8)
        for thread in floods:
            thread.join()
    return ended


def test_a_short_request_does_not_wait_for_another_keys_queue() -> None:
    assert order_of_answers("specdec.cli") == ["bob", "alice", "alice"]


@EXHAUSTIVE
def test_in_the_order_of_arrival_it_does() -> None:
    assert order_of_answers("tests.server.unfair") != ["bob", "alice", "alice"]


@EXHAUSTIVE
@pytest.mark.parametrize("key", ["alice", "carol"])
def test_a_key_may_queue_its_share_or_its_limit(key: str) -> None:
    """Carol's key has its own limit; Alice's may fill half of the queue, to leave space for others."""
    keys = ("--api-key", "alice", "--api-key", "bob", "--api-key", "carol max_queued=3", "--max-queued", "8")
    with Live(*keys) as live:
        most = 4 if key == "alice" else 3
        asked = {"prompt": "x", "max_tokens": 4}
        for n in (most, most + 1):
            answer = live.ask(PATH, {**asked, "n": n}, Authorization=f"Bearer {key}")
            assert answer.status == (200 if n == most else 400), "waiting would not help"
        assert f"more than the {most} that this key may have in flight" in answer.error["message"]
        assert live.ask(PATH, {**asked, "n": 4}, Authorization="Bearer bob").status == 200
