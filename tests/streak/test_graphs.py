"""Which graphs are captured and replayed, with a device that only notes what it is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.draft.proposal import Shape
from specdec.streak.extent import Extent
from specdec.streak.form import Form
from specdec.streak.graphs import SIZES, Graphs
from specdec.streak.rows import Rows

EXTENT = Extent(rows=20, nodes=4, path=3, drafts=4)
FORMS = [Form.drafting(shape, greedy=False) for shape in (None, Shape(2, 1, 3))]


class Step:
    """Counts its runs, and returns how many rows it was given."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, Form, Rows]] = []

    def __call__(self, rows: Rows, form: Form) -> Tensor:
        self.ran.append((len(rows.length_B), form, rows))
        return torch.tensor([len(self.ran)])


class Device:
    """Stands in for torch.cuda: captures what runs while it is told to, and replays by counting."""

    def __init__(self, free: int, each: int) -> None:
        self.free, self.each, self.replayed = free, each, 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        device = self

        class Graph:
            def replay(self) -> None:
                device.replayed += 1

        class Stream:
            def wait_stream(self, _: Any) -> None: ...

        @contextmanager
        def capture(graph: Graph, *, pool: int) -> Iterator[None]:
            assert pool == 7
            device.free -= device.each
            yield

        @contextmanager
        def stream(_: Stream) -> Iterator[None]:
            yield

        for name, value in {
            "CUDAGraph": Graph,
            "Stream": Stream,
            "graph": capture,
            "stream": stream,
            "current_stream": Stream,
            "graph_pool_handle": lambda: 7,
            "mem_get_info": lambda _: (device.free, 0),
        }.items():
            patch.setattr(torch.cuda, name, value)


def make() -> tuple[Graphs, Step]:
    step = Step()

    def rows() -> Rows:
        return Rows.empty(EXTENT, blocks=2, hidden=8, dtype=torch.float32, device=torch.device("cpu"))

    return Graphs(step, rows(), rows), step  # type: ignore[arg-type]


def test_a_batch_replays_the_next_size_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(free=10**9, each=1)
    device.install(monkeypatch)
    graphs, step = make()
    graphs.capture(FORMS)
    assert graphs.sizes == [*(size for size in SIZES if size < 20), 20]
    captured = step.ran[1::2]
    assert [(size, form) for size, form, _ in captured] == [
        (size, form) for size in graphs.sizes for form in FORMS
    ]
    ran = len(step.ran)
    for count in range(1, 21):
        size = next(size for size in graphs.sizes if size >= count)
        at = 1 + [(own, form) for own, form, _ in captured].index((size, FORMS[1]))
        assert graphs.size(count) == size
        assert graphs(FORMS[1], size).item() == 2 * at, "the result of that capture"
    assert len(step.ran) == ran and device.replayed == 20


def test_capture_warms_up_on_rows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(free=10**9, each=1).install(monkeypatch)
    graphs, step = make()
    graphs.capture(FORMS)
    for (_, _, warm), (_, _, live) in zip(step.ran[0::2], step.ran[1::2], strict=True):
        assert warm.length_B.data_ptr() != graphs.rows.length_B.data_ptr()
        assert live.length_B.data_ptr() == graphs.rows.length_B.data_ptr()


def test_what_the_budget_does_not_hold_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(free=1000, each=40)
    device.install(monkeypatch)
    graphs, step = make()
    graphs.capture(FORMS)
    assert len(step.ran) == 2 * 3, "the third passes a tenth of what was free"
    before = len(step.ran)
    graphs(FORMS[0], 1)
    assert len(step.ran) == before
    graphs(FORMS[0], 20)
    assert step.ran[-1][:2] == (20, FORMS[0]) and len(step.ran) == before + 1


def test_what_cannot_be_captured_runs_uncaptured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Device(free=10**9, each=1).install(monkeypatch)
    graphs, step = make()
    inner = step.__class__.__call__

    def fail(self: Step, rows: Rows, form: Form) -> Tensor:
        if len(rows.length_B) == 3:
            raise torch.OutOfMemoryError("no memory is left")
        return inner(self, rows, form)

    monkeypatch.setattr(Step, "__call__", fail)
    graphs.capture(FORMS)
    assert "3 rows and more run uncaptured: no memory is left" in caplog.text
    monkeypatch.setattr(Step, "__call__", inner)
    ran = len(step.ran)
    graphs(FORMS[1], 2)
    assert len(step.ran) == ran
    graphs(FORMS[1], 3)
    assert len(step.ran) == ran + 1
