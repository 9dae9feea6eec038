"""Prompt look-up proposes the tokens after the latest of the longest matches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.ngram import NgramDrafter, believe_the_latest
from specdec.draft.proposal import DraftShape
from tests.draft.naive import continuation, full_tree, longest_match, paths, shapes, tokens

TEXTS = st.one_of(tokens(), tokens(vocabulary=12))


def drafter_with(text: list[int], cut: int = 0, **options: int) -> NgramDrafter:
    drafter = NgramDrafter(**options)
    drafter.extend("request", text[:cut])
    for token in text[cut:]:
        drafter.extend("request", [token])
    return drafter


@given(TEXTS, shapes(), st.integers(0, 60))
def test_a_proposal_is_the_best_of_what_a_search_everywhere_finds(
    text: list[int], shape: DraftShape, cut: int
) -> None:
    proposal = drafter_with(text, cut).look_up("request", shape)
    length, places = longest_match([text], text, range(2, 5))
    read = [continuation(text, place, shape.num_steps, open_ended=True) for _, place in places]
    candidates = full_tree(read[: 16 if shape.topk > 1 else 1], length, shape.topk, believe_the_latest)
    expected = {candidate.path: candidate.score for candidate in candidates}
    best = sorted(expected.values(), reverse=True)[: shape.num_draft_tokens - 1]
    assert sorted(proposal.scores[1:], reverse=True) == pytest.approx(best)
    assert [expected[path] for path in paths(proposal)[1:]] == pytest.approx(list(proposal.scores[1:]))


@given(TEXTS, st.integers(1, 8))
def test_a_chain_is_the_latest_continuation(text: list[int], num_steps: int) -> None:
    proposal = drafter_with(text).look_up("request", DraftShape(num_steps, 1, num_steps + 1))
    _, places = longest_match([text], text, range(2, 5))
    expected = [continuation(text, place, num_steps, open_ended=True) for _, place in places[:1]]
    assert [proposal.tree.tokens[1:]] == (expected or [()])
    assert proposal.tree.is_chain


def test_the_longest_match_comes_before_a_later_one() -> None:
    text = [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]
    assert drafter_with(text).look_up("request", DraftShape(1, 1, 2)).tree.tokens[1:] == (50,)


def test_of_matches_of_one_length_the_latest_comes_first() -> None:
    text = [3, 4, 50, 9, 3, 4, 60, 8, 3, 4]
    assert drafter_with(text).look_up("request", DraftShape(2, 1, 3)).tree.tokens[1:] == (60, 8)
    tree = drafter_with(text).look_up("request", DraftShape(1, 2, 3))
    assert tree.tree.tokens[1:] == (60, 50) and tree.scores[1] > tree.scores[2]


def test_one_token_is_no_match_unless_asked_for() -> None:
    text = [5, 6, 7, 5]
    assert drafter_with(text).look_up("request", DraftShape(2, 1, 3)).num_drafted == 0
    assert drafter_with(text, min_length=1).look_up("request", DraftShape(2, 1, 3)).tree.tokens[1:] == (6, 7)


def test_longer_matches_score_higher() -> None:
    scores = [
        drafter_with([*range(1, n + 1), 50, 70, *range(1, n + 1)])
        .look_up("request", DraftShape(1, 1, 2))
        .scores
        for n in (2, 3, 4)
    ]
    assert scores == sorted(scores) and len(set(scores)) == 3


def test_a_loop_goes_on() -> None:
    """The latest match is one period back, so that its continuation is the draft itself."""
    assert drafter_with([1, 2, 3, 1, 2, 3]).look_up("request", DraftShape(7, 1, 8)).tree.tokens[1:] == (
        1,
        2,
        3,
        1,
        2,
        3,
        1,
    )


@pytest.mark.parametrize("text", [[1], [1, 1], [1, 2, 3, 4]])
def test_a_text_that_repeats_nothing_gets_no_draft(text: list[int]) -> None:
    assert drafter_with(text).look_up("request", DraftShape(3, 2, 6)).num_drafted == 0


def test_requests_do_not_see_each_other_and_leave_nothing() -> None:
    drafter = NgramDrafter()
    drafter.extend("a", [1, 2, 3, 1, 2])
    drafter.extend("b", [1, 2])
    assert drafter.look_up("b", DraftShape(1, 1, 2)).num_drafted == 0
    assert drafter.look_up("a", DraftShape(1, 1, 2)).tree.tokens[1:] == (3,)
    drafter.end("a")
    drafter.extend("a", [1, 2])
    assert drafter.look_up("a", DraftShape(1, 1, 2)).num_drafted == 0
    drafter.end("a")
    drafter.end("b")
    assert len(drafter._texts) == 0
    with pytest.raises(KeyError):
        drafter.look_up("a", DraftShape(1, 1, 2))


def test_what_is_rejected_again_and_again_scores_lower() -> None:
    drafter = drafter_with([1, 2, 3, 1, 2])
    shape = DraftShape(1, 1, 2)
    before = drafter.look_up("request", shape)
    for _ in range(200):
        drafter.calibrator.observe(drafter.look_up("request", shape), ())
    after = drafter.look_up("request", shape)
    assert after.tree == before.tree and after.beliefs == before.beliefs
    assert after.scores[1] < 0.2 * before.scores[1]
