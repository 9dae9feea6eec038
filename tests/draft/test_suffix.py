"""Suffix drafting proposes by the counts of the longest match's continuations, in bounded memory."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.tenant import SOLE
from specdec.draft.proposal import DraftShape, Proposal
from specdec.draft.suffix import NGRAMS, SuffixDrafter, believe_the_counts
from tests.draft.naive import END, Candidate, continuation, full_tree, longest_match, paths, shapes, tokens


def finish(drafter: SuffixDrafter, output: list[int], prompt: Sequence[int] = ()) -> None:
    drafter.extend("other", prompt)
    drafter.extend("other", output)
    drafter.end("other")
    if output:
        drafter.share(output)


def by_counting(outputs: Sequence[Sequence[int]], text: Sequence[int], shape: DraftShape) -> list[Candidate]:
    """Return the candidates from all occurrences in the request and in the outputs."""
    shared = [token for output in outputs for token in (*output, END)]
    length, places = longest_match([text, shared], text, range(1, 65))
    num_steps = min(shape.num_steps, 2 * length)
    read = [continuation((text, shared)[i], place, num_steps, open_ended=i == 0) for i, place in places]
    return full_tree(read, length, shape.topk, believe_the_counts)


def assert_is_best_of(proposal: Proposal, candidates: list[Candidate], shape: DraftShape) -> None:
    expected = {candidate.path: candidate.score for candidate in candidates}
    best = sorted(expected.values(), reverse=True)[: shape.num_draft_tokens - 1]
    assert sorted(proposal.scores[1:], reverse=True) == pytest.approx(best)
    assert [expected[path] for path in paths(proposal)[1:]] == pytest.approx(list(proposal.scores[1:]))


@given(st.lists(tokens(max_size=25).filter(bool), max_size=4), tokens(max_size=50), shapes())
def test_a_proposal_is_the_best_of_what_counting_everywhere_finds(
    outputs: list[list[int]], text: list[int], shape: DraftShape
) -> None:
    drafter = SuffixDrafter()
    for output in outputs:
        finish(drafter, output)
    drafter.extend("request", text[:10])
    for token in text[10:]:
        drafter.extend("request", [token])
    assert_is_best_of(drafter.look_up("request", shape), by_counting(outputs, text, shape), shape)


@given(st.lists(tokens(max_size=25).filter(bool), min_size=1, max_size=12), tokens(max_size=20), shapes())
def test_evicting_leaves_the_latest_outputs_whole(
    outputs: list[list[int]], text: list[int], shape: DraftShape
) -> None:
    limit = 40
    drafter = SuffixDrafter(max_shared_tokens=limit)
    kept: list[list[int]] = []
    for output in outputs:
        finish(drafter, output)
        kept.append(output)
        while sum(len(each) + 1 for each in kept) > limit:
            kept.pop(0)
        assert drafter._outputs.num_tokens == sum(len(each) + 1 for each in kept)
    drafter.extend("request", text)
    assert_is_best_of(drafter.look_up("request", shape), by_counting(kept, text, shape), shape)


def test_what_followed_more_often_scores_higher() -> None:
    drafter = SuffixDrafter()
    for follower in (7, 8, 8, 9, 8):
        finish(drafter, [1, 2, 3, follower])
    drafter.extend("request", [1, 2, 3])
    proposal = drafter.look_up("request", DraftShape(1, 4, 8))
    assert proposal.tree.tokens[1:] == (8, 9, 7), "of equals the latest comes first"
    assert proposal.beliefs[1:] == (3 / 8, 1 / 8, 1 / 8)
    assert drafter.look_up("request", DraftShape(1, 1, 2)).tree.tokens[1:] == (8,)


def test_the_longest_match_decides_wherever_it_is() -> None:
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3, 4, 50])
    drafter.extend("request", [3, 4, 60, 1, 2, 3, 4])
    assert drafter.look_up("request", DraftShape(1, 4, 8)).tree.tokens[1:] == (50,)
    drafter.extend("second", [9, 1, 2, 3, 4, 60, 9, 1, 2, 3, 4])
    assert drafter.look_up("second", DraftShape(1, 4, 8)).tree.tokens[1:] == (60,)


def test_matches_of_one_length_are_counted_together() -> None:
    drafter = SuffixDrafter()
    finish(drafter, [3, 4, 50])
    finish(drafter, [3, 4, 50])
    drafter.extend("request", [3, 4, 60, 3, 4])
    proposal = drafter.look_up("request", DraftShape(1, 4, 8))
    assert proposal.tree.tokens[1:] == (50, 60) and proposal.beliefs[1:] == (2 / 5, 1 / 5)


def test_counts_are_of_the_latest_places() -> None:
    drafter = SuffixDrafter()
    for follower in [7] * 200 + [8] * 100:
        finish(drafter, [1, follower])
    drafter.extend("request", [1])
    proposal = drafter.look_up("request", DraftShape(1, 4, 8))
    assert proposal.tree.tokens[1:] == (8, 7) and proposal.beliefs[1:] == (100 / 130, 28 / 130)


@pytest.mark.parametrize(("length", "drafted"), [(1, 2), (2, 4), (3, 6), (20, 16)])
def test_a_longer_match_allows_a_longer_draft(length: int, drafted: int) -> None:
    drafter = SuffixDrafter()
    finish(drafter, list(range(100)))
    drafter.extend("request", list(range(length)))
    proposal = drafter.look_up("request", DraftShape(16, 1, 17))
    assert proposal.tree.tokens[1:] == tuple(range(length, length + drafted))


@given(tokens(max_size=50), shapes())
def test_one_child_per_node_makes_a_chain(text: list[int], shape: DraftShape) -> None:
    drafter = SuffixDrafter()
    drafter.extend("request", text)
    proposal = drafter.look_up("request", replace(shape, topk=1))
    assert proposal.tree.is_chain and proposal.num_drafted <= min(shape.num_steps, shape.num_draft_tokens - 1)


def test_only_the_outputs_of_finished_requests_are_shared() -> None:
    drafter = SuffixDrafter()
    drafter.extend("cancelled", [1, 2])
    drafter.extend("cancelled", [3, 4])
    drafter.end("cancelled")
    finish(drafter, [5, 6], prompt=[1, 2, 3])
    finish(drafter, [], prompt=[1, 2, 3])
    assert drafter._outputs.num_tokens == 3
    drafter.extend("request", [1, 2, 3])
    assert drafter.look_up("request", DraftShape(2, 2, 8)).num_drafted == 0
    drafter.extend("request", [5])
    assert drafter.look_up("request", DraftShape(2, 2, 8)).tree.tokens[1:] == (6,)


def test_ending_forgets_a_request_wholly() -> None:
    drafter = SuffixDrafter()
    for key in range(5):
        drafter.extend(key, [key, key])
        drafter.end(key)
    assert len(drafter._texts) == drafter._outputs.num_tokens == 0
    drafter.extend(3, [3])
    assert drafter.look_up(3, DraftShape(1, 1, 2)).num_drafted == 0
    with pytest.raises(KeyError):
        drafter.look_up(4, DraftShape(1, 1, 2))


def test_memory_is_bounded_under_long_random_streams() -> None:
    """Index entries and buckets stay within the limit, however long it runs."""
    limit, random = 3000, Random(5)
    drafter = SuffixDrafter(max_shared_tokens=limit)
    said: dict[int, list[int]] = {}
    for key in range(400):
        drafter.extend(key, [random.randrange(1000) for _ in range(random.randrange(20))])
        said[key] = []
        for _ in range(random.randrange(8)):
            tokens = [random.randrange(1000) for _ in range(random.randrange(40))]
            drafter.extend(key, tokens)
            said[key] += tokens
        if key >= 5:
            drafter.end(key - 5)
            if said[key - 5] and random.random() < 0.9:
                drafter.share(said[key - 5])
        assert drafter._outputs.num_tokens <= limit and len(drafter._texts) <= 6
        for text in drafter._outputs.of(SOLE):
            assert len(text) == drafter._outputs.num_tokens
            assert sum(len(table.earlier) for table in text.tables) <= len(NGRAMS) * limit
            assert sum(len(table.heads) for table in text.tables) <= len(NGRAMS) * 4 * limit
    assert drafter._outputs.num_tokens > limit - 300, "the limit was reached"


def test_an_output_longer_than_the_limit_keeps_its_last_part() -> None:
    drafter = SuffixDrafter(max_shared_tokens=10)
    finish(drafter, [90, 91])
    finish(drafter, list(range(30)))
    assert drafter._outputs.num_tokens == 10
    drafter.extend("request", [21])
    assert drafter.look_up("request", DraftShape(2, 1, 3)).tree.tokens[1:] == (22, 23)
    drafter.extend("second", [20])
    assert drafter.look_up("second", DraftShape(2, 1, 3)).num_drafted == 0


def test_flushing_forgets_what_ended_and_keeps_what_runs() -> None:
    drafter = SuffixDrafter()
    for key, text in (("a", [1, 2, 3]), ("b", [4, 5, 6, 4])):
        drafter.extend(key, [9])
        drafter.extend(key, text)
    drafter.end("a")
    drafter.share([1, 2, 3])
    drafter.extend("c", [1, 2])
    shape = DraftShape(1, 1, 2)
    assert drafter.look_up("c", shape).tree.tokens[1:] == (3,)
    drafter.flush()
    assert drafter._outputs.num_tokens == 0 and not drafter.look_up("c", shape).num_drafted
    assert drafter.look_up("b", shape).tree.tokens[1:] == (5,)
    drafter.end("c")
    assert len(drafter._texts) == 1


def test_nodes_that_only_earlier_outputs_had_are_marked() -> None:
    drafter = SuffixDrafter()
    drafter.share([1, 2, 3, 4, 5])
    drafter.extend("known", [9, 1, 2])
    drafter.extend("own", [1, 2, 3, 7, 1, 2])
    known, own = (drafter.look_up(key, DraftShape(4, 2, 8)) for key in ("known", "own"))
    assert known.tree.tokens[1:4] == (3, 4, 5) and all(known.shared[1:])
    assert {own.tree.tokens[node] for node, shared in enumerate(own.shared) if shared} <= {4, 5}
    assert own.tree.tokens[1] == 3 and not own.shared[1], "it follows in the request's own text too"
    drafter.flush()
    assert drafter.look_up("own", DraftShape(4, 2, 8)).shared == ()
