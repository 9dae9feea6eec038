"""Finished outputs are visible to their own tenant only, and evicted fairly from bounded memory."""

from collections import defaultdict
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.tenant import SOLE, Tenant
from specdec.draft import output_store as outputs_module
from specdec.draft.history import END
from specdec.draft.output_store import OutputStore
from specdec.draft.proposal import DraftShape
from specdec.draft.suffix import NGRAMS, SuffixDrafter
from tests.draft.naive import tokens

ALICE, BOB, SALTED = Tenant("alice"), Tenant("bob"), Tenant("alice", "salt")
TENANTS = (ALICE, BOB, SALTED, SOLE)
SHAPE = DraftShape(4, 3, 12)
Kept = list[tuple[Tenant, list[int]]]
"""Findable outputs, the oldest first."""


def spelled(kept: Kept, tenant: Tenant) -> list[int]:
    return [token for own, output in kept if own == tenant for token in (*output, END)]


def stored(outputs: OutputStore, tenant: Tenant) -> list[int]:
    return [token for text in outputs.of(tenant) for token in text.tokens]


def evicted(kept: Kept, limit: int) -> Kept:
    """Evict naively: the caller with most tokens loses its oldest output."""
    kept = list(kept)
    while sum(len(output) + 1 for _, output in kept) > limit:
        held = defaultdict[str, int](int)
        for tenant, output in kept:
            held[tenant.caller] += len(output) + 1
        most = max(held.values())
        kept.remove(next(own for own in kept if held[own[0].caller] == most))
    return kept


@given(st.lists(st.tuples(st.sampled_from(TENANTS), tokens(max_size=20).filter(bool)), max_size=8), tokens())
def test_what_others_wrote_changes_no_proposal(said: Kept, text: list[int]) -> None:
    for tenant in TENANTS:
        proposals = []
        for heard in (said, [(own, output) for own, output in said if own == tenant]):
            drafter = SuffixDrafter()
            for own, output in heard:
                drafter.share(output, own)
            drafter.extend("request", text)
            proposals.append(drafter.look_up("request", SHAPE, tenant))
        assert proposals[0] == proposals[1]


def test_one_index_for_all_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: every tenant sees all outputs."""
    right = OutputStore.add
    monkeypatch.setattr(OutputStore, "add", lambda outputs, output, tenant: right(outputs, output, SOLE))
    monkeypatch.setattr(OutputStore, "of", lambda outputs, tenant: tuple(outputs._texts.values()))
    with pytest.raises(AssertionError):
        test_what_others_wrote_changes_no_proposal()


def test_a_request_feeds_its_own_tenant() -> None:
    drafter = SuffixDrafter()
    drafter.share([5, 6, 7], SALTED)
    for tenant in TENANTS:
        drafter.extend(tenant, [9, 5, 6])
        expected = (7,) if tenant == SALTED else ()
        assert drafter.look_up(tenant, DraftShape(1, 1, 2), tenant).tree.tokens[1:] == expected


@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 12)), max_size=30),
    st.integers(60, 90),
)
def test_the_caller_that_has_most_loses_its_oldest(lengths: Sequence[tuple[Tenant, int]], limit: int) -> None:
    outputs, kept = OutputStore(NGRAMS, 64, limit), Kept()
    for number, (tenant, length) in enumerate(lengths):
        output = [number] * length
        outputs.add(output, tenant)
        kept = evicted([*kept, (tenant, output)], limit)
        assert outputs.num_tokens == sum(len(own) + 1 for _, own in kept) <= limit
        for own in TENANTS:
            assert stored(outputs, own) == spelled(kept, own)


@pytest.mark.parametrize("salts", [1, 500], ids=["one salt", "many salts"])
def test_one_caller_leaves_another_its_fair_part(salts: int) -> None:
    outputs, random = OutputStore(NGRAMS, 64, 1000), Random(0)
    for number in range(49):
        outputs.add([number] * 9, ALICE)
    for number in range(2000):
        outputs.add([100 + number] * random.randrange(1, 40), Tenant("bob", str(number % salts)))
        assert outputs.num_tokens <= 1000
    assert len(stored(outputs, ALICE)) == 490, "it had less than half"
    for number in range(60):
        outputs.add([number] * 9, ALICE)
    assert 490 <= len(stored(outputs, ALICE)) <= 510, "and gets no more than half"
    outputs.add(list(range(2000)), Tenant("carol"))
    assert stored(outputs, Tenant("carol")) == [*range(2000 - 332, 2000), END], "of one too long the end"
    assert outputs.num_tokens <= 1000


def test_salts_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_module, "MAX_TENANTS", 20)
    outputs = OutputStore(NGRAMS, 64, 100_000)
    outputs.add([1] * 1000, ALICE)
    for number in range(500):
        outputs.add([number], Tenant("bob", str(number)))
        assert len(outputs._texts) <= 20
    assert outputs.num_tokens == 1001 + 19 * 2 and outputs.of(Tenant("bob", "499"))


def test_flushing_forgets_all_or_one_callers() -> None:
    outputs = OutputStore(NGRAMS, 64, 1000)
    for tenant in (*TENANTS, ALICE):
        outputs.add([1, 2, 3], tenant)
    outputs.flush("alice")
    assert outputs.num_tokens == 8 and not outputs.of(ALICE) and not outputs.of(SALTED)
    outputs.flush("unknown")
    outputs.flush("")
    assert outputs.of(BOB) and not outputs.of(SOLE)
    outputs.flush()
    assert not outputs.num_tokens and not outputs._texts and not outputs._shares
    drafter = SuffixDrafter()
    drafter.share([1, 2, 3], ALICE)
    drafter.extend("request", [1, 2])
    drafter.flush("bob")
    assert drafter.look_up("request", DraftShape(1, 1, 2), ALICE).tree.tokens[1:] == (3,)
    drafter.flush("alice")
    assert drafter.look_up("request", DraftShape(1, 1, 2), ALICE).num_drafted == 0
