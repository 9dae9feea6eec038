"""The n-gram index finds what an exhaustive search finds, after appending, forgetting and rebuilding."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.history import END, MAX_STEPS, TokenHistory
from tests.draft.naive import continuation, longest_match, tokens

LENGTHS = st.sets(st.integers(1, 6), min_size=1).map(lambda lengths: sorted({1, *lengths}))


@given(st.lists(tokens(max_size=20), max_size=6), tokens(max_size=12), LENGTHS, st.integers(6, 12))
def test_searching_finds_the_longest_match_wherever_it_is(
    pieces: list[list[int]], context: list[int], lengths: list[int], depth: int
) -> None:
    """Some lengths are indexed; matches of any length up to the depth are found."""
    history = TokenHistory(lengths, depth)
    for piece in pieces:
        history.extend(piece)
    text = [token for piece in pieces for token in piece]
    assert history.tokens == text
    length, places = longest_match([text], context, range(1, depth + 1))
    assert history.search(context, most=100) == (length, [place for _, place in places])
    assert history.search(context, most=2)[1] == [place for _, place in places[:2]]


@given(st.lists(tokens(max_size=12), min_size=1, max_size=12), tokens(max_size=12), st.integers(0, 8))
def test_forgetting_leaves_what_an_index_of_the_rest_would_find(
    outputs: list[list[int]], context: list[int], keep: int
) -> None:
    history = TokenHistory([1, 2, 4], depth=8)
    for i, output in enumerate(outputs):
        history.extend([*output, END])
        if i >= keep:
            history.forget(len(outputs[i - keep]) + 1)
    kept = outputs[-keep:] if keep else []
    fresh = TokenHistory([1, 2, 4], depth=8)
    fresh.extend([token for output in kept for token in (*output, END)])
    assert history.tokens == fresh.tokens
    assert history.search(context, 100) == fresh.search(context, 100)
    length, places = longest_match([fresh.tokens], context, range(1, 9))
    assert fresh.search(context, 100) == (length, [place for _, place in places])


@pytest.mark.parametrize("forgotten", [0, 1, 700])
def test_a_larger_index_finds_the_same(forgotten: int) -> None:
    """A full index is rebuilt larger, without the forgotten tokens."""
    random = Random(forgotten)
    text = [random.randrange(40) for _ in range(3000)]
    history = TokenHistory([1, 2, 4], depth=8)
    history.extend(text[:1000])
    history.forget(forgotten)
    for i in range(1000, 3000, 7):
        history.extend(text[i : i + 7])
    assert len(history.tables[0].heads) > 1024
    for _ in range(50):
        start = random.randrange(forgotten, 2990)
        context = text[start : start + 5]
        length, places = longest_match([text[forgotten:]], context, range(1, 9))
        assert history.search(context, 1000) == (length, [place for _, place in places])


@pytest.mark.parametrize("forgotten", [0, 40])
def test_many_tokens_are_indexed_as_one_by_one(forgotten: int) -> None:
    random = Random(forgotten)
    text = [random.choice((END, *range(9))) for _ in range(300)]
    at_once, one_by_one = (TokenHistory([1, 2, 3, 8], depth=8) for _ in range(2))
    at_once.extend(text[:100])
    at_once.forget(forgotten)
    at_once.extend(text[100:])
    for token in text:
        one_by_one.extend([token])
    one_by_one.forget(forgotten)
    for own, other in zip(at_once.tables, one_by_one.tables, strict=True):
        assert own.heads == other.heads and own.earlier == other.earlier


def test_a_search_follows_a_chain_only_so_far() -> None:
    history = TokenHistory([1, 2], depth=8)
    history.extend([7] * 3000)
    length, places = history.search([7] * 8, most=10_000)
    assert length == 8 and places == list(range(2999, 2999 - len(places), -1))
    assert MAX_STEPS - 8 <= len(places) <= MAX_STEPS


def test_a_long_match_is_found_however_often_its_end_came_since() -> None:
    history = TokenHistory([1, 2, 4], depth=8)
    history.extend([1, 2, 3, 4, 9] + [4, 5] * MAX_STEPS)
    assert history.search([1, 2, 3, 4], most=10) == (4, [4])


def test_a_match_that_nothing_follows_does_not_hide_a_shorter_one() -> None:
    history = TokenHistory([1, 2, 4], depth=8)
    history.extend([1, 2, 3, 4, END, 9, 4, 5, END])
    assert history.search([1, 2, 3, 4], most=10) == (1, [7])


@given(tokens(max_size=20).filter(bool), st.integers(1, 12), st.data())
def test_a_continuation_ends_with_its_output_or_repeats_itself(
    text: list[int], limit: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(text) - 1))
    history = TokenHistory([1], depth=1)
    history.extend(text)
    assert tuple(history.continuation(place, limit)) == continuation(text, place, limit, open_ended=True)
    history.extend([END, 1, 2])
    expected = continuation([*text, END], place, limit, open_ended=False)
    assert tuple(history.continuation(place, limit)) == expected


def test_an_index_holds_one_entry_per_token_and_length_and_few_heads() -> None:
    """Memory is bounded by this number of entries, whatever the text, even after much forgetting."""
    random, kept, longest = Random(0), 2000, 200
    history = TokenHistory([1, 2, 4, 8, 16], depth=64)
    for _ in range(300):
        output = [random.randrange(50_000) for _ in range(random.randrange(1, longest))]
        history.extend([*output, END])
        if len(history) > kept:
            history.forget(len(history) - kept)
        for table in history.tables:
            assert len(table.earlier) == len(history) <= kept
            assert len(table.heads) <= 4 * (kept + longest)
