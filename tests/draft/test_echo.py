"""Detects a text that repeats itself, however few tokens are indexed at a time."""

import pytest

from specdec.draft.repetition import LENGTH, RepetitionIndex


@pytest.mark.parametrize("most", [3, 8, 100])
def test_a_repeated_text_is_noticed_once_all_of_it_is_indexed(most: int) -> None:
    echo, text = RepetitionIndex(), [*range(50), *range(LENGTH)]
    found = []
    while echo.indexed < len(text):
        before = echo.indexed
        found.append(echo.repeats(text, most))
        assert 0 < echo.indexed - before <= most
    assert found == [*[False] * (len(found) - 1), True]
    assert not echo.repeats(text, most), "nothing is new"
    assert not echo.repeats([*text, 99], most)


def test_new_text_is_no_echo() -> None:
    echo = RepetitionIndex()
    assert not any(echo.repeats(list(range(length)), 100) for length in range(1, 60))
    assert not echo.repeats([*range(60), *range(LENGTH - 1)], 100), "too short a repetition"
