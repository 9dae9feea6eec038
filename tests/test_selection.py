"""The default run covers each value of each parameter, and keeps explicit marks."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from tests.selection import EXHAUSTIVE, FEW, mark_products, only

FAMILIES, FORMS = ("a", "b", "c", "d"), ("cpu", "native")


class Item:
    """The part of a test item that `mark_products` uses."""

    def __init__(self, **params: Any) -> None:
        self.callspec = type("Callspec", (), {"params": params})
        self.nodeid = f"test_x[{params}]"
        self.marks = [pytest.mark.parametrize(("width", "family"), [])]

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark.mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark)


def product(widths: Iterable[int]) -> list[Any]:
    """Return a test's items over pairs of widths and families, for each of FORMS."""
    pairs = list(zip(widths, FAMILIES, strict=False))
    return [Item(width=w, family=f, form=form) for (w, f), form in itertools.product(pairs, FORMS)]


def run(items: list[Any]) -> list[dict[str, Any]]:
    mark_products(items)
    return [item.callspec.params for item in items if EXHAUSTIVE not in item.marks]


def test_each_value_of_each_parameter_is_run_and_few_else() -> None:
    found = run(product(range(4)))
    assert {(own["width"], own["family"]) for own in found} == set(enumerate(FAMILIES))
    assert {own["form"] for own in found} == set(FORMS)
    assert len(found) == len(FAMILIES)


def test_a_small_product_is_run_whole() -> None:
    assert len(run(product(range(2)))) == FEW


def test_values_that_are_marked_by_hand_count_for_nothing() -> None:
    items = product(range(4))
    items[0].add_marker(EXHAUSTIVE)
    assert any(own["family"] == "a" for own in run(items))


def test_skipped_tests_cover_nothing() -> None:
    items = product(range(4))
    for item in items[::2]:
        item.add_marker(pytest.mark.skipif(True, reason="absent"))
    assert {own["family"] for own in run(items) if own["form"] == FORMS[1]} == set(FAMILIES)


def test_kept_values_that_are_not_there_are_noticed() -> None:
    for kept in ({1, 5}, lambda value: value > 9):
        with pytest.raises(AssertionError):
            only(kept, [1, 2])


def test_only_keeps_ids_marks_and_tuples() -> None:
    cases = [(1, "a"), pytest.param(2, "b", id="own"), pytest.param(3, "c", marks=pytest.mark.gpu)]
    first, second, third = only({(1, "a"), (2, "b")}, cases)
    assert first.values == (1, "a") and not first.marks
    assert second.id == "own" and not second.marks
    assert third.values == (3, "c") and [mark.name for mark in third.marks] == ["gpu", "exhaustive"]
