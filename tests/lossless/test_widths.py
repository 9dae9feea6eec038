"""Rows that verify drafts of different widths in one step match plain decoding."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from specdec import SpecEngine
from specdec.core.batch import StepReport
from specdec.draft.costs import Costs
from specdec.draft.policy import Policy
from specdec.errors import SpecdecError
from specdec.state_slots.integrity import IntegrityError
from specdec.state_slots.window import Row, Window, build_window
from tests.lossless.cases import SHAPES, Case, differences, drafting_engine, generate
from tests.models.representatives import EVERY_CELL, REPRESENTATIVES
from tests.selection import only

Known = Callable[[str], tuple[Path, list[Case]]]


def fix_costs(policy: Policy) -> None:
    """Fix the costs so that a row's token costs a sixth of a pass: the policy then mixes widths."""
    costs = Costs()
    for rows in (1, 2, 4, 8, 16, 32):
        for tokens in (rows, 16 * rows):
            costs.observe(rows, tokens, 1 + tokens / rows / 6)
    costs.observe = lambda *_: None  # type: ignore[method-assign]
    policy.steps = costs


def watch_widths(engine: SpecEngine) -> list[set[int]]:
    """Record the widths of drafted rows in each step."""
    seen: list[set[int]] = []

    def note(report: StepReport) -> None:
        seen.append({len(row.tree) for row in report.result.rows if row.is_drafted})

    engine.model.loop.observers.append(note)
    return seen


def keeps_the_texts(known: Known, family: str, drafter: str, shape: str, backing: str) -> bool:
    """Return whether an adaptive engine matches a plain one, in steps of several widths."""
    folder, cases = known(family)
    fields: dict[str, Any] = {**SHAPES[shape], "slots": backing, "adaptive": True}
    try:
        with drafting_engine(folder, drafter, cases, **fields) as (engine, _):
            policy = engine.model.loop.speculation.policy
            fix_costs(policy)
            seen = watch_widths(engine)
            found = generate(engine, cases * 3)
    except (SpecdecError, IntegrityError, AssertionError):
        return False
    several = sum(len(widths) > 1 for widths in seen)
    print(f"{drafter} {shape} {backing}: {several} of {len(seen)} steps had several widths")
    assert several >= 4
    return not differences(cases * 3, found, within=1e-6)


CELLS = [
    *itertools.product(EVERY_CELL, ("mtp", "suffix"), SHAPES, ("record", "snapshot")),
    *((family, "oracle", "tree", "record") for family in REPRESENTATIVES if family not in EVERY_CELL),
]


@pytest.mark.parametrize(
    ("family", "drafter", "shape", "backing"), only(lambda cell: cell[0] == "qwen3_5", CELLS)
)
def test_texts_of_mixed_widths_equal_plain_decoding(
    known: Known, family: str, drafter: str, shape: str, backing: str
) -> None:
    assert keeps_the_texts(known, family, drafter, shape, backing)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("family", EVERY_CELL)
def test_reading_a_row_with_another_rows_width_is_detected(
    known: Known, family: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: rows are located in the packed window with the width of the next row."""

    def wrong(rows: Sequence[Row], *rest: Any) -> Window:
        window = build_window(rows, *rest)
        order = sorted(range(len(rows)), key=lambda i: window.first_B[i])
        widths = [len(rows[i].tree) for i in (*order[1:], order[0])]
        firsts = dict(zip(order, accumulate(widths[:-1], initial=0), strict=True))
        return replace(window, first_B=tuple(firsts[i] for i in range(len(rows))))

    monkeypatch.setattr("specdec.core.executor.build_window", wrong)
    assert not keeps_the_texts(known, family, "mtp", shape, "record")
