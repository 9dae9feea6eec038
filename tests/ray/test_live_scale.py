"""Replicas are added under load and removed again by a real Ray; no request is lost."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.ray.live import LiveRay, needs_ray
from tests.selection import EXHAUSTIVE

pytestmark = [needs_ray, EXHAUSTIVE]

MANY, TOKENS, WAIT_S = 12, 60, 600.0
OPTIONS = ("--max-replicas", "2", "--scale-down-delay", "3", "--max-running", "2")


def test_one_to_two_to_one_replica_loses_nothing() -> None:
    with LiveRay(*OPTIONS) as live, ThreadPoolExecutor(MANY + 1) as pool:
        ends, is_calm, is_over = list[str](), threading.Event(), threading.Event()

        def ask(number: int) -> None:
            """Stream one completion after the other; most clients leave when the load falls."""
            while not is_over.is_set() and not (is_calm.is_set() and number):
                body = {"prompt": f"{number} def f(x):", "max_tokens": TOKENS, "ignore_eos": True}
                answer = live.ask("/v1/completions", body | {"stream": True})
                own = answer.events if answer.status == 200 else []
                is_whole = own and "error" not in json.dumps(own[-1]) and own[-1]["choices"]
                ends.append(own[-1]["choices"][0]["finish_reason"] if is_whole else str(answer.data))

        def until(count: int) -> None:
            until_s = time.monotonic() + WAIT_S
            while len(live.replicas()) != count:
                assert time.monotonic() < until_s, f"{live.replicas()} after {len(ends)} requests"
                time.sleep(0.2)

        work = [pool.submit(ask, number) for number in range(MANY)]
        try:
            until(2)
            is_calm.set()
            until(1)
        finally:
            is_calm.set()
            is_over.set()
        for own in work:
            own.result()
        assert len(ends) > MANY and {*ends} == {"length"}, ends
