"""The end of thinking, in the output and along draft paths, and the tokens allowed there."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from specdec import RequestError, ThinkingSpan
from specdec.core import thinking
from specdec.core.thinking import ThinkingLimit, ThinkingMarks, ThinkingRule
from specdec.text.answers.thinking import ThinkingPhase, ThinkingState, ThinkingTrack
from specdec.verify.limits import AllowedTokens, TokenLimit
from tests.verify.test_limits import allowed

VOCAB, END = 40, 39
SPELT = {
    1: "<",
    2: "a",
    3: "/a>",
    4: "<a>",
    5: "</a>\n",
    6: " ",
    7: "/a>{",
    8: "</a>\n{",
    9: "/a>\n",
    30: "*|*",
    END: "",
}


class Letters:
    """A tokenizer of a few tokens, in which the end marker takes two."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        return {"<a>": [4], "</a>": [1, 3], "?": [], "x<": [20], "*|*": [30]}.get(text, [])

    def spell(self, token: int) -> str:
        return SPELT.get(token, "x")

    def spell_all(self, vocab: int) -> Iterator[str]:
        return map(self.spell, range(vocab))


class Counting(AllowedTokens):
    """A grammar of three tokens in sequence: the allowed tokens depend on its progress."""

    def __init__(self) -> None:
        super().__init__((), VOCAB)
        self.taken: list[int] = []

    def words(self, path: tuple[int, ...]) -> torch.Tensor | None:
        return AllowedTokens([10 + len(self.taken) + len(path)], VOCAB).words(())

    def observe(self, token: int) -> bool:
        self.taken.append(token)
        return True


def marks(start: str = "<a>", end: str = "</a>") -> ThinkingMarks:
    return ThinkingMarks(start, end, tokenizer=Letters(), vocab=VOCAB)  # type: ignore[arg-type]


def terms(*, opened: bool = True, budget: int | None = None, has_grammar: bool = True) -> ThinkingRule:
    span = ThinkingSpan(start="<a>", end="</a>", opened=opened, budget=budget)
    return ThinkingRule(span, marks(), {END}, has_grammar=has_grammar)


def may_follow(limit: TokenLimit, path: tuple[int, ...]) -> set[int]:
    return allowed(limit.words(path), VOCAB)


EVERYTHING = set(range(VOCAB))
THINKING = EVERYTHING - {END, 8}


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


@pytest.mark.parametrize("text", [(2, 2, 2, 5, 2, 2), (2, 2, 2, 1, 3, 2), (2, 1, 1, 1, 3), (1, 2, 2, 1, 9)])
def test_the_tokens_of_thinking_are_counted_without_its_markers(text: tuple[int, ...]) -> None:
    track = ThinkingTrack("<a>", "</a>", Letters().spell, opened=False)
    place = track.first
    for token in (4, *text):
        place = track.after(place, token)
    assert (place.phase, place.spent) == (ThinkingPhase.OVER, 3)


def test_a_budget_ends_thinking_token_by_token_along_a_path_too() -> None:
    limit = terms(budget=2).begin(None)
    for path, wanted in (
        ((), EVERYTHING),
        ((2,), EVERYTHING),
        ((2, 2), {1}),
        ((2, 2, 1), {3}),
        ((2, 2, 1, 3), EVERYTHING),
        ((2, 1), {3}),  # a started end marker continues
        ((2, 1, 3), EVERYTHING),
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
    assert may_follow(limit, ()) == may_follow(limit, (2, 10)) == THINKING
    assert may_follow(limit, (2, 5)) == {10} and may_follow(limit, (2, 1, 3, 10)) == {11}
    for token in (2, 10, 5):
        assert limit.observe(token)
    assert not form.taken and may_follow(limit, ()) == {10} and may_follow(limit, (10, 11)) == {12}
    assert limit.observe(10) and form.taken == [10] and may_follow(limit, ()) == {11}


def test_an_output_that_may_think_opens_with_that_or_with_its_form() -> None:
    form = Counting()
    limit = terms(opened=False).begin(form)
    assert may_follow(limit, ()) == {4, 10}
    assert may_follow(limit, (10,)) == {11} and may_follow(limit, (4,)) == THINKING
    assert may_follow(limit, (4, 5)) == {10}
    assert limit.observe(10) and form.taken == [10] and may_follow(limit, ()) == {11}


def disagreements(shared: ThinkingRule) -> list[tuple[int, ...]]:
    """List the texts for which a draft's mask differs from the mask after acceptance."""
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
    """Each draft node has the mask that plain decoding would have there."""
    assert not disagreements(terms(opened=opened, budget=budget))


@pytest.mark.parametrize("mutant", ["a path is not followed", "the form sees the whole path"])
def test_a_limit_that_misreads_paths_is_found_out(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = ThinkingLimit._follow

    def misread(self: ThinkingLimit, path: tuple[int, ...]) -> tuple[ThinkingState, tuple[int, ...] | None]:
        place, own = follow(self, path)
        return follow(self, ()) if mutant == "a path is not followed" else (place, path if own else own)

    monkeypatch.setattr(ThinkingLimit, "_follow", misread)
    assert disagreements(terms(budget=2))


def _observe(limit: ThinkingLimit, tokens: tuple[int, ...]) -> bool:
    return all([limit.observe(token) for token in tokens])


class Reading(AllowedTokens):
    """A grammar that records its text."""

    def __init__(self) -> None:
        super().__init__((), VOCAB)
        self.text = ""

    def words(self, path: tuple[int, ...]) -> torch.Tensor | None:
        return None

    def observe(self, token: int) -> bool:
        self.text += Letters().spell(token)
        return True


def unseen(shared: ThinkingRule) -> list[tuple[int, ...]]:
    """List the sampleable texts whose grammar does not see exactly the characters after the end marker."""
    found = []
    for text in product((1, 2, 3, 5, 7, 8, 9), repeat=4):
        form = Reading()
        limit = shared.begin(form)
        sampled = all(
            token in may_follow(limit, text[:at]) for at, token in enumerate(text)
        )  # as along a draft
        _observe(limit, text)
        answer = "".join(map(Letters().spell, text)).partition("</a>")[2]
        if sampled and answer.lstrip("\n") != form.text.lstrip("\n"):
            found.append(text)
    return found


def test_a_form_sees_all_that_stands_behind_the_end() -> None:
    """A token with the rest of the end marker and more would bypass the grammar's first characters."""
    limit = terms().begin(Reading())
    assert may_follow(limit, (1,)) == THINKING - {7} and 9 in may_follow(limit, (1,))
    assert may_follow(limit, (2,)) == THINKING and may_follow(limit, (1, 3)) == EVERYTHING
    assert not unseen(terms()) and not unseen(terms(budget=1))
    assert may_follow(terms(has_grammar=False).begin(None), (1,)) == EVERYTHING


@pytest.mark.parametrize("mutant", ["no token runs on", "those of a part of the end are forgotten"])
def test_a_form_that_misses_text_is_found_out(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {} if mutant == "no token runs on" else {"": marks().overruns[""]}
    monkeypatch.setattr(thinking, "overruns", lambda end, spelled: kept)
    assert unseen(terms())


def test_markers_that_cannot_be_written_are_refused() -> None:
    for end in ("?", "x<"):
        with pytest.raises(
            RequestError, match="thinking: the tokenizer cannot encode the end marker "
        ) as error:
            marks(end=end)
        assert error.value.field == "thinking"
    span = ThinkingSpan(end="*|*", budget=1)
    with pytest.raises(RequestError, match="may overlap itself"):
        ThinkingRule(span, marks(end="*|*"), {END}, has_grammar=True)
    assert marks(start="?").opening is None


def test_markers_are_no_tokens_without_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"thinking: the model's folder has no tokenizer\.json"):
        ThinkingMarks("<a>", "</a>", tokenizer=None, vocab=VOCAB)
