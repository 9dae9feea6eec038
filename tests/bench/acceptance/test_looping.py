import pytest

from specdec.bench.acceptance.measure import loops


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([*range(12), *[5] * 12], True),
        ([*range(12), *[5, 6, 7, 8] * 3], True),
        ([*range(12), *[5, 6, 7, 8] * 2, 5, 6, 7, 9], False),
        ([*range(12), *[1, 2, 3, 4, 5, 6] * 2], False),
        ([*[1] * 12, *range(12)], False),
        ([*range(8), *[4, 5] * 4], True),
        ([1, 2], False),
        ([], False),
    ],
)
def test_a_text_whose_second_half_repeats_three_times_loops(tokens: list[int], expected: bool) -> None:
    assert loops(tokens) == expected
    assert loops(tuple(tokens)) == expected
