"""Callers share one engine: no caller starves or slows another beyond its share."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config.tenant import Tenant
from specdec.core.fairness import MOST_IDLE, FairQueue, VirtualClock
from specdec.core.request import Request
from specdec.core.scheduler import ADMITTING_S, MOST_PARKED, TURN_S, Scheduler
from tests.core.test_scheduler import LONGEST, Bench

ALICE, BOB = Tenant("alice"), Tenant("bob")


class Crowd(Bench):
    """A bench whose callers submit numbered requests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.numbers = count(1)
        self.requests: list[Request] = []

    def ask(self, tenant: Tenant, requests: int = 1, prompt: int = 4, max_tokens: int = 8) -> list[Request]:
        asked = [self.submit(next(self.numbers), prompt, max_tokens, tenant) for _ in range(requests)]
        self.requests += asked
        return asked

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step()

    @property
    def served(self) -> Counter[Tenant]:
        """Return the computed tokens by tenant, without recomputed ones."""
        served: Counter[Tenant] = Counter()
        for request in self.requests:
            served[request.tenant] += request.charged_tokens
        return served

    def running(self, tenant: Tenant) -> int:
        return sum(own.tenant == tenant for own in self.scheduler.running)


def serves_a_latecomer() -> None:
    """Alice has filled every slot and queues more; Bob sends one short request, then many."""
    crowd = Crowd(slabs=40)
    crowd.ask(ALICE, 40, max_tokens=50)
    crowd.advance(5)
    assert crowd.running(ALICE) == 8
    (first,) = crowd.ask(BOB)
    crowd.advance()
    assert first in crowd.scheduler.running, "Bob waits behind what Alice has queued"
    crowd.ask(BOB, 20, max_tokens=50)
    crowd.advance(5)
    assert crowd.running(ALICE) == crowd.running(BOB) == 4, "each has half"


def test_a_latecomer_is_served_at_once_and_gets_its_share() -> None:
    serves_a_latecomer()


def test_first_come_first_served_would_starve_a_latecomer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "heads", lambda queue, *_: sorted(queue, key=lambda own: own.number)[:1])
    with pytest.raises(AssertionError, match="Bob waits"):
        serves_a_latecomer()


def test_without_preemption_a_latecomer_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_youngest", lambda *_: None)
    with pytest.raises(AssertionError, match="Bob waits"):
        serves_a_latecomer()


def test_more_callers_than_places_take_turns() -> None:
    now_s, callers = 0.0, [Tenant(f"{number}") for number in range(10)]
    crowd = Crowd(slabs=40)
    crowd.scheduler.clock = lambda: now_s
    for caller in callers:
        crowd.ask(caller, max_tokens=50)
    ran = set[Tenant]()
    for _ in range(40):
        crowd.advance()
        now_s += TURN_S / 4
        ran |= {own.tenant for own in crowd.scheduler.running}
        assert len(crowd.scheduler.running) == 8
    assert ran == set(callers)
    assert max(crowd.served.values()) - min(crowd.served.values()) <= 12, crowd.served
    assert 2 <= crowd.scheduler.preemptions <= 2 * 40 / 4


def test_a_turn_lasts_as_long_as_its_prefill_took() -> None:
    """Otherwise two long prompts could preempt each other forever without an answer."""
    now_s = 0.0
    crowd = Crowd(slabs=40, max_running=1, chunk_tokens=4)
    crowd.scheduler.clock = lambda: now_s
    (first,) = crowd.ask(ALICE, prompt=32, max_tokens=30)
    crowd.ask(BOB)
    for _ in range(14):  # eight of these prefill, each as long as a turn
        crowd.advance()
        now_s += TURN_S
        assert first in crowd.scheduler.running
    crowd.advance()
    assert first not in crowd.scheduler.running and crowd.running(BOB)


def test_a_batch_is_not_interrupted_for_a_turn_while_places_are_free() -> None:
    """The waiting request then needs memory, which a turn would not provide."""
    now_s = 0.0
    crowd = Crowd(slabs=40)
    crowd.scheduler.clock = lambda: now_s
    for number in range(8):
        crowd.ask(Tenant(f"{number}"), max_tokens=50)
    crowd.advance()
    crowd.ask(BOB)
    crowd.advance()
    assert not crowd.scheduler.may_take_turn()
    now_s = 2 * TURN_S
    assert crowd.scheduler.may_take_turn()
    crowd.scheduler.max_running = 9
    assert not crowd.scheduler.may_take_turn()


def test_one_callers_requests_take_no_turns() -> None:
    now_s = 0.0
    crowd = Crowd(slabs=40)
    crowd.scheduler.clock = lambda: now_s
    crowd.ask(ALICE, 12, max_tokens=50)
    for _ in range(20):
        crowd.advance()
        now_s += TURN_S
    assert not crowd.scheduler.preemptions


def test_places_are_divided_however_a_caller_cuts_its_work() -> None:
    """Alice sends long prompts with short answers, Bob the opposite: each keeps half of the slots."""
    crowd = Crowd(slabs=60)
    for _ in range(150):
        crowd.ask(ALICE, 4, prompt=40, max_tokens=4)
        crowd.ask(BOB, 4, prompt=2, max_tokens=40)
        crowd.advance(4)
    assert crowd.served[BOB] > 0.9 * 600 * 4
    assert crowd.scheduler.preemptions < 30, "places that change hands cost what was computed"


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
    before = crowd.served
    crowd.advance(100)
    since = crowd.served - before
    assert since[ALICE] == pytest.approx(since[BOB], rel=0.2)


def test_a_late_caller_has_no_credit_for_what_others_decoded_while_nothing_waited() -> None:
    """Bob runs alone for long. Then both send long prompts, of which only one fits into a step."""
    crowd = Crowd(slabs=60, chunk_tokens=8)
    crowd.ask(BOB, 2, prompt=2, max_tokens=60)
    crowd.advance(40)
    crowd.ask(ALICE, 20, prompt=40, max_tokens=2)
    (late,) = crowd.ask(BOB, prompt=8)
    crowd.advance(8)
    assert late.output_length, "Alice's prompts come first until she has had what Bob had"


def test_a_standing_clock_gives_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    def charge(clock: VirtualClock, costs: dict[str, float], weights: dict[str, float]) -> None:
        for flow, cost in costs.items():
            clock._times[flow] = clock.at(flow) + cost / weights[flow]

    monkeypatch.setattr(VirtualClock, "charge", charge)
    with pytest.raises(AssertionError, match="come first"):
        test_a_late_caller_has_no_credit_for_what_others_decoded_while_nothing_waited()


def test_new_connections_do_not_starve_one_that_stays() -> None:
    crowd = Crowd(slabs=40, max_running=4)
    stays = Tenant(source="stays")
    crowd.ask(stays, max_tokens=30)
    crowd.advance(10)
    waits = crowd.ask(stays, 2)
    for number in range(400):
        crowd.ask(Tenant(source=f"new {number}"), max_tokens=11)
        crowd.advance(2)
    assert len(crowd.scheduler.waiting) > 20, "they come faster than they are served"
    assert all(wait.finish_reason for wait in waits)


def test_places_are_not_taken_from_one_caller_for_a_request_that_waits_for_more() -> None:
    """Bob's second prompt waits for the step's budget, so Alice is not preempted for it."""
    crowd = Crowd(slabs=60, chunk_tokens=8)
    crowd.ask(ALICE, 20, max_tokens=50)
    crowd.advance(10)
    crowd.ask(BOB, 2, prompt=40)
    crowd.advance(3)
    assert (crowd.running(BOB), crowd.scheduler.preemptions) == (1, 1)


def test_a_request_that_waits_for_all_memory_does_not_stop_small_ones() -> None:
    crowd = Crowd(slabs=12, max_running=8)
    crowd.ask(ALICE, prompt=20, max_tokens=40)
    crowd.advance(2)
    crowd.ask(Tenant("carol"), prompt=60, max_tokens=4)
    crowd.advance(1)
    (small,) = crowd.ask(BOB, prompt=2, max_tokens=2)
    crowd.advance(3)
    assert small.finish_reason and not crowd.running(Tenant("carol"))


def test_the_host_goes_on_where_admission_stopped_at_its_bound() -> None:
    crowd = Crowd(slabs=40)
    crowd.ask(ALICE, 40, max_tokens=50)
    crowd.advance(3)
    assert not crowd.scheduler.schedule().has_more
    crowd.ask(BOB, 8)
    assert crowd.scheduler.schedule().has_more and crowd.running(BOB) == MOST_PARKED


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
    crowd.scheduler.clock = partial(next, count(step=ADMITTING_S / 80))  # each request takes two of these
    crowd.advance()
    assert crowd.running(ALICE) == others + (40 if others else 60)
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
    """Their computed tokens can be cached while they still hold memory."""
    crowd, parked = Crowd(slabs=40), list[Request]()

    def park(requests: Iterable[Request]) -> None:
        parked.extend(request for request in requests if request.committed and request.num_computed_tokens)

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
