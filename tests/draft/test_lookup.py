"""The index receives every token of a sequence once, in order, however rarely it is queried."""

from collections.abc import Hashable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.tenant import Tenant
from specdec.draft import lookup as lookup_module
from specdec.draft.drafter import DraftRequest
from specdec.draft.history import TokenHistory
from specdec.draft.lookup import LookupDrafter
from specdec.draft.ngram import NgramDrafter
from specdec.draft.proposal import DraftShape, Proposal
from specdec.draft.suffix import SuffixDrafter
from tests.draft.naive import tokens

SHAPE = DraftShape(3, 2, 6)
ALICE, BOB = Tenant("alice"), Tenant("bob")
NO_BLOCKS = torch.empty(0, dtype=torch.int64)


class Spy(LookupDrafter):
    """Repeat a text's latest tokens, and record the calls."""

    def __init__(self) -> None:
        super().__init__([1], 1)

    @property
    def texts(self) -> dict[Hashable, list[int]]:
        return {key: text.tokens for key, text in self._texts.items()}

    def continue_text(self, text: TokenHistory, shape: DraftShape, tenant: Tenant) -> Proposal:
        assert tenant == ALICE
        latest = text.tokens[-shape.num_steps :]
        return Proposal.chain(text.tokens[-1], latest, [0.5**n for n in range(len(latest))])


def want(
    text: Sequence[int], prompt_length: int, shape: DraftShape | None = SHAPE, key: Hashable = "a"
) -> DraftRequest:
    return DraftRequest(key, prompt_length, text, NO_BLOCKS, shape, ALICE)


def test_what_was_said_since_the_last_question_is_told_once() -> None:
    lookup, text = Spy(), list(range(30))
    for length in (6, 7, 7, 12, 30):
        proposal = lookup.propose([want(text[:length], 5)])[0]
        assert lookup.texts["a"] == text[:length]
        assert proposal.tree.tokens[1:] == tuple(text[length - SHAPE.num_steps : length])


def test_who_wants_nothing_is_no_trouble_to_the_index() -> None:
    lookup = Spy()
    found = lookup.propose([want([1, 2, 3], 2, None), want([4, 5, 6, 7], 2, key="b")])
    assert found[0].num_drafted == 0 and found[1].tree.tokens[1:] == (5, 6, 7)
    assert list(lookup.texts) == ["b"]


def test_long_texts_are_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows wait for indexing, but rows that grow in each step do not starve long ones."""
    monkeypatch.setattr(lookup_module, "MOST_INDEXED", 10)
    lookup = Spy()
    lengths, indexed = [6, 30, 3], 0
    proposed = []
    for _ in range(12):
        wants = [want(list(range(length)), 2, key=i) for i, length in enumerate(lengths)]
        proposed.append([own.num_drafted > 0 for own in lookup.propose(wants)])
        before, indexed = indexed, sum(map(len, lookup.texts.values()))
        assert indexed - before <= 10
        lengths = [length + 1 for length in lengths]
    assert proposed[0] == [True, False, False] and proposed[-1] == [True, True, True]
    assert all(lookup.texts[own.key] == own.tokens for own in wants)


def test_lost_memory_is_no_reason_to_forget_a_text() -> None:
    lookup = Spy()
    lookup.propose([want([1, 2, 3], 2)])
    lookup.on_preempt("a")
    lookup.on_preempt("nobody")
    lookup.propose([want([1, 2, 3, 4], 2)])
    assert lookup.texts["a"] == [1, 2, 3, 4]


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(("output", "shared"), [([3, 4, 5], 4), (None, 0), ([], 0)])
def test_an_end_shares_the_output_and_forgets_the_sequence(
    asked: bool, output: list[int] | None, shared: int
) -> None:
    lookup = SuffixDrafter()
    if asked:
        lookup.propose([want([1, 2, 3], 2)])
    lookup.end("a", [1, 2], output, ALICE)
    assert lookup._outputs.num_tokens == shared and not lookup._texts
    # A key may be reused by another sequence.
    lookup.propose([want([7, 8], 1)])
    assert lookup._texts["a"].tokens == [7, 8]


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
@given(st.data())
def test_being_asked_now_and_then_changes_no_proposal(
    make: type[NgramDrafter | SuffixDrafter], data: st.DataObject
) -> None:
    """Sequences start, are queried at random times, and end: equal to indexing everything at once."""
    lookup, other, rng = make(), make(), Random(data.draw(st.integers(0, 99)))
    for key, text in enumerate(data.draw(st.lists(tokens(max_size=40).filter(bool), max_size=4))):
        prompt_length = rng.randint(1, len(text))
        for length in range(prompt_length, len(text)):
            if rng.random() < 0.3:
                lookup.propose([want(text[:length], prompt_length, rng.choice([None, SHAPE]), key)])
        asked = [each.propose([want(text, prompt_length, SHAPE, key)])[0] for each in (lookup, other)]
        assert asked[0] == asked[1]
        if rng.random() < 0.7:
            for each in (lookup, other):
                each.end(key, text[:prompt_length], [*text[prompt_length:], 1, 2], ALICE)


def test_an_output_serves_the_next_request_whether_it_was_asked_about_or_not() -> None:
    for asked in (True, False):
        lookup = SuffixDrafter()
        if asked:
            lookup.propose([want([1, 2, 3], 2)])
        lookup.end("a", [1, 2], [3, 4, 5, 6], ALICE)
        assert lookup.propose([want([9, 3, 4], 1, DraftShape(2, 1, 3), "b")])[0].tree.tokens[1:] == (5, 6)
        # A cancelled request's output is not shared.
        lookup.propose([want([30, 31, 32, 33], 1, SHAPE, "c")])
        lookup.end("c", [30], None, ALICE)
        assert lookup.propose([want([9, 31, 32], 1, SHAPE, "d")])[0].num_drafted == 0
