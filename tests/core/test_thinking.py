"""Where thinking ends, in the output and along drafted paths, and what may follow there."""

from itertools import product

import pytest
import torch

from specdec import RequestError, ThinkingSpan
from specdec.core.thinking import ThinkingLimit, ThinkingTerms
from specdec.text.answers.thinking import Phase, Place, ThinkingTrack
from specdec.verify.limits import Allowed, Limit
from tests.verify.test_limits import allowed

VOCAB, END = 40, 39
SPELT = {1: "<", 2: "a", 3: "/a>", 4: "<a>", 5: "</a>\n", 6: " ", END: ""}


class Letters:
    """A tokenizer of a few tokens, in which the end is two of them."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        return {"<a>": [4], "</a>": [1, 3]}[text]

    def spell(self, token: int) -> str:
        return SPELT.get(token, "x")


class Counting(Allowed):
    """A form of three tokens, one after the other: what may follow hangs on how far it has come."""

    def __init__(self) -> None:
        super().__init__((), VOCAB)
        self.taken: list[int] = []

    def words(self, path: tuple[int, ...]) -> torch.Tensor | None:
        return Allowed([10 + len(self.taken) + len(path)], VOCAB).words(())

    def observe(self, token: int) -> bool:
        self.taken.append(token)
        return True


def terms(*, opened: bool = True, budget: int | None = None) -> ThinkingTerms:
    span = ThinkingSpan(start="<a>", end="</a>", opened=opened, budget=budget)
    return ThinkingTerms(span, {END}, Letters(), VOCAB)  # type: ignore[arg-type]


def may_follow(limit: Limit, path: tuple[int, ...]) -> set[int]:
    return allowed(limit.words(path), VOCAB)


EVERYTHING = set(range(VOCAB))


@pytest.mark.parametrize(
    ("text", "opened", "phases"),
    [
        ([2, 1, 3, 2], True, "TTTOO"),
        ([2, 5, 4], True, "TTOO"),
        ([4, 2, 5], False, "MTTO"),
        ([6, 4, 1, 1, 3], False, "MMTTTO"),
        ([2, 4], False, "MOO"),
        ([1, 1], False, "MMO"),
    ],
)
def test_tokens_tell_where_thinking_ends(text: list[int], opened: bool, phases: str) -> None:
    track = ThinkingTrack("<a>", "</a>", Letters().spell, opened=opened)
    place, found = track.first, track.first.phase.name[0]
    for token in text:
        place = track.after(place, token)
        found += place.phase.name[0]
    assert found == phases


def test_the_tokens_of_thinking_are_counted() -> None:
    track = ThinkingTrack("<a>", "</a>", Letters().spell, opened=False)
    place = track.first
    for token in (4, 2, 2, 2, 5, 2, 2):
        place = track.after(place, token)
    assert (place.phase, place.spent) == (Phase.OVER, 3)


def test_a_budget_ends_thinking_token_by_token_along_a_path_too() -> None:
    limit = terms(budget=2).begin(None)
    for path, wanted in (
        ((), EVERYTHING),
        ((2,), EVERYTHING),
        ((2, 2), {1}),
        ((2, 2, 1), {3}),
        ((2, 2, 1, 3), EVERYTHING),
        ((5,), EVERYTHING),
        ((2, 5, 2, 2), EVERYTHING),
    ):
        assert may_follow(limit, path) == wanted, path
    assert limit.observe(2) and may_follow(limit, ()) == EVERYTHING
    assert limit.observe(2) and may_follow(limit, ()) == {1}
    assert limit.observe(1) and may_follow(limit, ()) == {3} and may_follow(limit, (3,)) == EVERYTHING
    assert not limit.observe(3), "from here on nothing is bounded"
    assert may_follow(terms(budget=0).begin(None), ()) == {1}


def test_a_form_begins_where_thinking_ends() -> None:
    form = Counting()
    limit = terms().begin(form)
    assert may_follow(limit, ()) == may_follow(limit, (2, 10)) == EVERYTHING - {END}
    assert may_follow(limit, (2, 5)) == {10} and may_follow(limit, (2, 1, 3, 10)) == {11}
    for token in (2, 10, 5):
        assert limit.observe(token)
    assert not form.taken and may_follow(limit, ()) == {10} and may_follow(limit, (10, 11)) == {12}
    assert limit.observe(10) and form.taken == [10] and may_follow(limit, ()) == {11}


def test_an_output_that_may_think_opens_with_that_or_with_its_form() -> None:
    form = Counting()
    limit = terms(opened=False).begin(form)
    assert may_follow(limit, ()) == {4, 10}
    assert may_follow(limit, (10,)) == {11} and may_follow(limit, (4,)) == EVERYTHING - {END}
    assert may_follow(limit, (4, 5)) == {10}
    assert limit.observe(10) and form.taken == [10] and may_follow(limit, ()) == {11}


def disagreements(shared: ThinkingTerms) -> list[tuple[int, ...]]:
    """List the texts of which a part, drafted, is bounded otherwise than once it is accepted."""
    found = []
    for text in product((1, 3, 4, 5, 10), repeat=4):
        for at, formed in product(range(len(text) + 1), (False, True)):
            ahead, after = (shared.begin(Counting() if formed else None) for _ in range(2))
            _observe(ahead, text[:at])
            if _observe(after, text) and may_follow(ahead, text[at:]) != may_follow(after, ()):
                found.append(text)
    return found


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 2])
def test_a_path_says_what_its_tokens_say_once_they_are_accepted(opened: bool, budget: int | None) -> None:
    """Whatever is drafted, each node is bounded as plain decoding would be there."""
    assert not disagreements(terms(opened=opened, budget=budget))


@pytest.mark.parametrize("mutant", ["a path is not followed", "the form sees the whole path"])
def test_a_limit_that_misreads_paths_is_found_out(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = ThinkingLimit._follow

    def misread(self: ThinkingLimit, path: tuple[int, ...]) -> tuple[Place, tuple[int, ...] | None]:
        place, own = follow(self, path)
        return follow(self, ()) if mutant == "a path is not followed" else (place, path if own else own)

    monkeypatch.setattr(ThinkingLimit, "_follow", misread)
    assert disagreements(terms(budget=2))


def _observe(limit: ThinkingLimit, tokens: tuple[int, ...]) -> bool:
    return all([limit.observe(token) for token in tokens])


def test_markers_are_no_tokens_without_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"thinking: the model's folder has no tokenizer\.json"):
        ThinkingTerms(ThinkingSpan(), {END}, None, VOCAB)
