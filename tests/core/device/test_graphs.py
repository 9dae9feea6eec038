"""Graph capture and replay, with a fake device that records calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from specdec.core.device.capture import Capturer
from specdec.core.device.extent import Extent
from specdec.core.device.graph_key import GraphKey
from specdec.core.device.graphs import SIZES, Graphs
from specdec.core.device.rows import BatchRows
from specdec.draft.proposal import DraftShape

EXTENT = Extent(rows=20, nodes=4, path=3, drafts=4)
KEYS = [GraphKey.drafting(shape, reads=True, filtered=True) for shape in (None, DraftShape(2, 1, 3))]


class Step:
    """Count runs, and return the number of rows."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, GraphKey, BatchRows]] = []
        self.prefilled: list[tuple[int, GraphKey]] = []

    def __call__(self, rows: BatchRows, key: GraphKey) -> Tensor:
        self.ran.append((len(rows.length_B), key, rows))
        return torch.tensor([len(self.ran)])

    def prefill_drafter(self, rows: BatchRows, key: GraphKey) -> None:
        assert not rows.start_B.any() and not rows.count_B.any(), "padding has nothing to read"
        self.prefilled.append((len(rows.length_B), key))


class Device:
    """A fake torch.cuda: records what runs during capture, and counts replays."""

    def __init__(self, free: int, each: int) -> None:
        self.free, self.each, self.replayed = free, each, 0
        self.current = self.home = "home"
        self.captured_on: list[str] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        device = self

        class Graph:
            def replay(self) -> None:
                device.replayed += 1

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_stream(self, _: Any) -> None: ...

        @contextmanager
        def capture(graph: Graph, *, pool: int) -> Iterator[None]:
            assert pool == 7
            before, device.current = device.current, "capture"
            device.captured_on.append(before)
            yield  # a failure leaves this stream current, as in torch
            device.current = before
            device.free -= device.each

        @contextmanager
        def stream(own: Stream) -> Iterator[None]:
            before, device.current = device.current, own.name
            try:
                yield
            finally:
                device.current = before

        for name, value in {
            "CUDAGraph": Graph,
            "Stream": lambda _: Stream("aside"),
            "graph": capture,
            "stream": stream,
            "current_stream": lambda _: Stream(device.current),
            "set_stream": lambda own: setattr(device, "current", own.name),
            "synchronize": lambda _: None,
            "graph_pool_handle": lambda: 7,
            "mem_get_info": lambda _: (device.free, 0),
        }.items():
            patch.setattr(torch.cuda, name, value)


def make() -> tuple[Graphs, Step]:
    step = Step()

    def rows() -> BatchRows:
        return BatchRows.empty(EXTENT, blocks=2, hidden=8, dtype=torch.float32, device=torch.device("cpu"))

    return Graphs(step, rows(), rows), step  # type: ignore[arg-type]


def test_a_batch_replays_the_next_size_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(free=10**9, each=1)
    device.install(monkeypatch)
    graphs, step = make()
    graphs.capture(KEYS)
    assert graphs.sizes == [*(size for size in SIZES if size < 20), 20]
    captured = step.ran[1::2]
    assert [(size, key) for size, key, _ in captured] == [
        (size, key) for size in graphs.sizes for key in KEYS
    ]
    ran = len(step.ran)
    for count in range(1, 21):
        size = next(size for size in graphs.sizes if size >= count)
        at = 1 + [(own, key) for own, key, _ in captured].index((size, KEYS[1]))
        assert graphs.size(count) == size
        assert graphs(KEYS[1], size).item() == 2 * at, "the result of that capture"
    assert len(step.ran) == ran and device.replayed == 20


def test_capture_warms_up_on_rows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(free=10**9, each=1).install(monkeypatch)
    graphs, step = make()
    graphs.capture(KEYS)
    for (_, _, warm), (_, _, live) in zip(step.ran[0::2], step.ran[1::2], strict=True):
        assert warm.length_B.data_ptr() != graphs.rows.length_B.data_ptr()
        assert live.length_B.data_ptr() == graphs.rows.length_B.data_ptr()


def test_what_the_budget_does_not_hold_runs_uncaptured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything is run once beforehand, since a first run compiles."""
    device = Device(free=1000, each=40)
    device.install(monkeypatch)
    graphs, step = make()
    graphs.capture(KEYS)
    live = [own for own in step.ran if own[2].length_B.data_ptr() == graphs.rows.length_B.data_ptr()]
    assert len(live) == 3, "the third passes a tenth of what was free"
    assert "steps of 2 rows and more run uncaptured: graphs took 0 MiB" in caplog.text
    warmed = [
        (size, key)
        for size, key, rows in step.ran
        if rows.length_B.data_ptr() != live[0][2].length_B.data_ptr()
    ]
    assert warmed == [(size, key) for size in graphs.sizes for key in KEYS]
    assert step.prefilled == [(size, KEYS[0]) for size in graphs.sizes]
    before = len(step.ran)
    graphs(KEYS[0], 1)
    assert len(step.ran) == before
    graphs(KEYS[0], 20)
    assert step.ran[-1][:2] == (20, KEYS[0]) and len(step.ran) == before + 1


@pytest.mark.parametrize("captures", [True, False], ids=["captured", "warmed"])
def test_a_form_that_fails_ends_itself_alone(
    captures: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure during capture leaves its stream current, which must not become the engine's."""
    device = Device(free=10**9, each=1)
    device.install(monkeypatch)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    graphs, step = make()
    inner = step.__class__.__call__

    def fail(self: Step, rows: BatchRows, key: GraphKey) -> Tensor:
        if len(rows.length_B) == 3 and key == KEYS[1] and (device.current == "capture") == captures:
            raise torch.OutOfMemoryError("no memory is left")
        return inner(self, rows, key)

    monkeypatch.setattr(Step, "__call__", fail)
    graphs.capture(KEYS)
    assert f"{KEYS[1]} of 3 rows and more run uncaptured: no memory is left" in caplog.text
    assert ("gives no cached memory back" in caplog.text) == captures
    assert device.current == "home" and set(device.captured_on) == {"home"}
    monkeypatch.setattr(Step, "__call__", inner)
    ran = len(step.ran)
    for key, size in ((KEYS[1], 2), (KEYS[0], 3), (KEYS[0], 20)):
        graphs(key, size)
        assert len(step.ran) == ran
    for size in (3, 4, 20):
        graphs(KEYS[1], size)
    assert len(step.ran) == ran + 3


def test_a_newer_torch_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Device(free=10**9, each=1).install(monkeypatch)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.0+cu130"))

    def fail() -> None:
        raise RuntimeError("it asks for a value")

    with pytest.raises(RuntimeError, match="asks for a value"):
        Capturer(torch.device("cpu"), 7)(fail)
    assert not caplog.text
