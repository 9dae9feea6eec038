"""Selection of the default run: `make test` skips tests marked `exhaustive`."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive
FEW = 4
"""Tests with at most this many parameter combinations run all of them by default."""


def only(kept: Collection[Any] | Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Mark all values except the kept ones as exhaustive. A tuple holds several arguments."""
    cases = [value if hasattr(value, "values") else _case(value) for value in values]
    found = [_value(case) for case in cases]
    keep = kept if callable(kept) else kept.__contains__
    assert any(map(keep, found)), "the default run is left without any of them"
    assert callable(kept) or all(value in found for value in kept), "a kept value is none of them"
    return [case if keep(value) else _marked(case) for case, value in zip(cases, found, strict=True)]


def _case(value: Any) -> Any:
    return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)


def _value(case: Any) -> Any:
    return case.values if len(case.values) > 1 else case.values[0]


def _marked(case: Any) -> Any:
    return pytest.param(*case.values, id=case.id, marks=(*case.marks, EXHAUSTIVE))


def mark_products(items: Sequence[pytest.Item]) -> None:
    """Mark tests as exhaustive if other tests of the same function cover all their parameters.

    A small subset of a large product remains, in which each value of each parameter occurs.
    """
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("exhaustive") and not _is_skipped(item):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for own in by_test.values():
        if len(own) > FEW:
            kept = _each_value_once(own)
            for item in own:
                if item not in kept:
                    item.add_marker(EXHAUSTIVE)


def _is_skipped(item: Any) -> bool:
    """Return whether the item is skipped here, and so covers nothing."""
    if item.get_closest_marker("skip"):
        return True
    return any(mark.args and mark.args[0] is True for mark in item.iter_markers("skipif"))


def _each_value_once(items: Sequence[Any]) -> Collection[Any]:
    values = {item: _values(item) for item in items}
    missing, kept = set().union(*values.values()), set()
    while missing:
        most = max(items, key=lambda item: len(values[item] & missing))
        kept.add(most)
        missing -= values[most]
    return kept


def _values(item: Any) -> set[tuple[Any, ...]]:
    """Return one value per `parametrize` mark, which may set several arguments, and per fixture."""
    params, found = dict(item.callspec.params), set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        names = tuple(name.strip() for name in names)
        found.add((names, *(id(params.pop(name)) for name in names)))
    return found | {(name, id(value)) for name, value in params.items()}
