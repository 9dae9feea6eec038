"""Callers share one engine: what one submits neither starves nor slows another beyond its share."""

from collections import Counter
from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config.tenant import Tenant
from specdec.core.fairness import MOST_IDLE, FairQueue
from specdec.core.request import Request
from specdec.core.scheduler import MOST_ADMITTED, Scheduler
from tests.core.test_scheduler import LONGEST, Bench

ALICE, BOB = Tenant("alice"), Tenant("bob")


class Crowd(Bench):
    """A bench whose callers submit requests, each with the next number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.numbers = count(1)
        self.served: Counter[Tenant] = Counter()

    def ask(self, tenant: Tenant, requests: int = 1, prompt: int = 4, max_tokens: int = 8) -> list[Request]:
        return [self.submit(next(self.numbers), prompt, max_tokens, tenant) for _ in range(requests)]

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            tenants = {own.number: own.tenant for own in (*self.scheduler.running, *self.scheduler.waiting)}
            for number, tokens in self.step():
                self.served[tenants[number]] += tokens

    def running(self, tenant: Tenant) -> int:
        return sum(own.tenant == tenant for own in self.scheduler.running)


def serves_a_latecomer() -> None:
    """Alice has filled every place and queues more; Bob asks for one short answer, then for many."""
    crowd = Crowd(slabs=40)
    crowd.ask(ALICE, 40, max_tokens=50)
    crowd.advance(5)
    assert crowd.running(ALICE) == 8
    (first,) = crowd.ask(BOB)
    crowd.advance()
    assert first in crowd.scheduler.running, "Bob waits behind what Alice has queued"
    crowd.ask(BOB, 20, max_tokens=50)
    crowd.advance(5)
    assert crowd.running(ALICE) == crowd.running(BOB) == 4


def test_a_latecomer_is_served_at_once_and_gets_its_share() -> None:
    serves_a_latecomer()


def test_first_come_first_served_would_starve_a_latecomer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FairQueue, "heads", lambda queue, _=None: sorted(queue, key=lambda own: own.number)[:1]
    )
    with pytest.raises(AssertionError, match="Bob waits"):
        serves_a_latecomer()


def test_without_preemption_a_latecomer_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_youngest", lambda *_: None)
    with pytest.raises(AssertionError, match="Bob waits"):
        serves_a_latecomer()


def test_tokens_are_divided_however_a_caller_cuts_its_work() -> None:
    """Alice sends long prompts with short answers, Bob the opposite."""
    crowd = Crowd(slabs=60)
    for _ in range(150):
        crowd.ask(ALICE, 2, prompt=40, max_tokens=4)
        crowd.ask(BOB, 4, prompt=2, max_tokens=40)
        crowd.advance(4)
    assert crowd.served[BOB] == pytest.approx(crowd.served[ALICE], rel=0.35)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tokens_are_divided_by_weight(weight: float) -> None:
    crowd = Crowd(slabs=60)
    for _ in range(150):
        for tenant in (ALICE, Tenant("bob", weight=weight)):
            crowd.ask(tenant, 4, max_tokens=20)
        crowd.advance(4)
    assert crowd.served[BOB] / crowd.served[ALICE] == pytest.approx(weight, rel=0.2)


def test_time_without_requests_is_no_credit() -> None:
    crowd = Crowd(slabs=60)
    crowd.ask(ALICE, 400, max_tokens=20)
    crowd.advance(300)
    crowd.ask(BOB, 400, max_tokens=20)
    crowd.served.clear()
    crowd.advance(100)
    assert crowd.served[ALICE] == pytest.approx(crowd.served[BOB], rel=0.2)


def test_salts_share_what_their_caller_gets() -> None:
    crowd = Crowd(slabs=60)
    salts = [Tenant("alice", salt) for salt in "abcdefgh"]
    for _ in range(100):
        for tenant in (*salts, BOB):
            crowd.ask(tenant, 2)
        crowd.advance(3)
    alices = [crowd.served[tenant] for tenant in salts]
    assert sum(alices) == pytest.approx(crowd.served[BOB], rel=0.2)
    assert max(alices) <= 1.5 * min(alices)


def test_connections_without_a_key_are_callers_of_their_own() -> None:
    crowd = Crowd(slabs=40)
    first, second = Tenant(source="127.0.0.1:1"), Tenant(source="127.0.0.1:2")
    assert first == second, "they share what is cached"
    crowd.ask(first, 30, max_tokens=50)
    crowd.advance(3)
    (late,) = crowd.ask(second)
    crowd.advance()
    assert late in crowd.scheduler.running


def test_a_short_prompt_is_computed_beside_a_long_one() -> None:
    crowd = Crowd(slabs=60, chunk_tokens=8)
    crowd.ask(ALICE, 3, prompt=60, max_tokens=2)
    crowd.advance(2)
    (short,) = crowd.ask(BOB, prompt=8)
    crowd.advance(2)
    assert short.output_length == 1


@pytest.mark.parametrize("others", [0, 1])
def test_a_step_admits_a_bounded_number_beside_another_caller(others: int) -> None:
    crowd = Crowd(slabs=400, max_running=100, chunk_tokens=1000)
    crowd.ask(BOB, others, max_tokens=50)
    crowd.ask(ALICE, others, max_tokens=50)
    crowd.advance()
    crowd.ask(ALICE, 60, max_tokens=50)
    crowd.advance()
    assert crowd.running(ALICE) == others + (MOST_ADMITTED if others else 60)
    crowd.advance()
    assert crowd.running(ALICE) == others + 60


def test_memory_above_a_share_is_given_up() -> None:
    crowd = Crowd(slabs=8, max_running=64)
    crowd.ask(ALICE, 30, prompt=20, max_tokens=40)
    crowd.advance(10)
    assert crowd.scheduler.waiting, "Alice has all memory"
    (late,) = crowd.ask(BOB, prompt=20)
    crowd.advance()
    assert late in crowd.scheduler.running


def test_two_that_cannot_run_together_do_not_alternate() -> None:
    crowd = Crowd(slabs=9, max_running=4)
    for tenant in (ALICE, BOB):
        crowd.ask(tenant, prompt=20, max_tokens=40)
    crowd.advance(90)
    assert crowd.scheduler.preemptions == 1 and len(crowd.ended) == 2


def test_parked_requests_are_shown_before_they_are_preempted() -> None:
    """What they have computed can be cached while memory is theirs."""
    crowd, parked = Crowd(slabs=40), list[Request]()

    def park(requests: Iterable[Request]) -> None:
        parked.extend(own for own in requests if own.committed and own.num_computed_tokens)

    crowd.scheduler.park = park
    crowd.ask(ALICE, 9, max_tokens=50)
    crowd.advance(3)
    crowd.ask(BOB)
    crowd.advance()
    assert [own.number for own in parked] == [8], "the youngest that ran"


def test_virtual_times_of_callers_that_left_are_forgotten() -> None:
    crowd = Crowd(slabs=40)
    for number in range(2 * MOST_IDLE):
        crowd.ask(Tenant(f"caller {number}", "salt"), max_tokens=1)
        crowd.advance(2)
    assert len(crowd.scheduler.waiting._callers._times) <= MOST_IDLE + 1
    assert len(crowd.scheduler.waiting._salts) <= MOST_IDLE + 1


ASKED = st.tuples(st.sampled_from("abc"), st.sampled_from(["", "x"]), st.integers(1, 40), st.integers(1, 20))


@given(st.lists(st.one_of(ASKED, st.integers(1, 4)), max_size=40), st.integers(3, 9), st.integers(1, 6))
@settings(max_examples=60)
def test_every_request_ends(
    events: list[tuple[str, str, int, int] | int], slabs: int, max_running: int
) -> None:
    crowd = Crowd(slabs=slabs, max_running=max_running, chunk_tokens=16)
    for event in events:
        if isinstance(event, int):
            crowd.advance(event)
        else:
            caller, salt, prompt, max_tokens = event
            crowd.ask(Tenant(caller, salt), prompt=prompt, max_tokens=min(max_tokens, LONGEST - prompt))
    for _ in range(5000):
        if not crowd.scheduler.has_work:
            break
        crowd.advance()
    assert not crowd.scheduler.has_work and len(crowd.ended) == next(crowd.numbers) - 1 and crowd.is_empty()
