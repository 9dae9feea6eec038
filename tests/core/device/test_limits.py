"""Edge cases of device steps: little memory, narrow windows, padded windows, a failing start."""

import asyncio
import math
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import Completion, SamplingParams, SpecEngine
from specdec.config.tenant import Tenant
from specdec.core.device import device_batch, runner
from specdec.core.device.device_batch import DeviceBatch
from specdec.core.device.drafting import DeviceDrafter
from specdec.core.device.taped import TapedSteps
from specdec.core.request import Request
from specdec.core.scheduler import BLOCKS, Scheduler
from specdec.draft.policy import Policy
from specdec.errors import EngineError
from specdec.state_slots.prefix.lease import PrefixLease
from tests.selection import EXHAUSTIVE

GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
ENDLESS = GREEDY.model_copy(update={"max_tokens": 10**6})


def within(seconds: float, run: Callable[[], list[Completion]]) -> list[Completion]:
    """Run in a thread that may be abandoned: an endless loop would hang the test."""
    came: list[list[Completion]] = []
    thread = threading.Thread(target=lambda: came.append(run()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert came, "nothing came"
    return came[0]


@EXHAUSTIVE
@pytest.mark.parametrize("draft", ["none", "mtp", "ngram"])
@pytest.mark.parametrize("rows", [1, 2])
def test_memory_for_the_texts_and_little_more_is_enough(folder: Path, rows: int, draft: str) -> None:
    """If device steps find no block, host steps continue: they need fewer, or preempt."""
    with SpecEngine(folder, dtype="float64", draft=draft, max_model_len=64) as engine:
        layout = engine.model.settings.layout
        prompts = [[1 + row, 2, 3] for row in range(rows)]
        expected = engine.generate(prompts, ENDLESS)
    for more in range(3):
        slabs = 1 + rows * layout.states_per_slab + -(-layout.blocks_for(64) // layout.blocks_per_slab) + more
        fields = {"max_running": rows, "memory_bytes": slabs * layout.slab_bytes, "max_model_len": 64}
        with SpecEngine(folder, dtype="float64", draft=draft, graphs=True, **fields) as engine:
            found = within(60, lambda engine=engine: engine.generate(prompts, ENDLESS))  # type: ignore[misc]
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]


@pytest.mark.parametrize("slots", ["record", "snapshot"])
@pytest.mark.parametrize(("draft", "adaptive"), [("mtp", True), ("mtp", False), ("ngram", False)])
def test_the_kernels_that_users_get_take_every_width(
    folder: Path, draft: str, adaptive: bool, slots: str
) -> None:
    """Float32, and C kernels if available; windows are narrower than the rows' slots."""
    fields = {"dtype": "float32", "draft": draft, "adaptive": adaptive, "slots": slots, "max_model_len": 64}
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5]]
    with SpecEngine(folder, graphs=True, **fields) as engine, SpecEngine(folder, **fields) as host:
        # The policy may choose a width per row for two rows: such steps run on the host.
        for own in (prompts, prompts[:1]):
            assert engine.generate(own, GREEDY)[0].token_ids == host.generate(own, GREEDY)[0].token_ids
        assert engine.model.loop.runner is not None and engine.model.loop.runner.steps > 0


def test_a_batch_that_cannot_be_loaded_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SpecEngine(folder, dtype="float64", draft="mtp", graphs=True, max_model_len=64) as engine:
        inner, calls = device_batch.load, iter(range(100))

        def load(*args: Any) -> None:
            if next(calls) == 0:
                raise RuntimeError("no memory is left")
            inner(*args)

        monkeypatch.setattr(device_batch, "load", load)
        with pytest.raises(EngineError, match="no memory is left"):
            engine.generate([[1, 2, 3]], GREEDY)
        runner = engine.model.loop.runner
        assert runner is not None and runner.batch.held == []
        assert len(engine.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 30
        assert runner.steps > 0


@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_stay_in_the_rows_own_blocks(folder: Path, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV that a head writes, before the first step and after others, stays in the row's own blocks."""
    inner, outside, read_any = DeviceDrafter._read, list[tuple[int, int]](), []
    fields = {"adaptive": False, "num_steps": 4, "topk": topk, "max_model_len": 64}
    with SpecEngine(folder, dtype="float64", draft="mtp", graphs=True, **fields) as engine:
        runner = engine.model.loop.runner
        assert runner is not None
        held, blocks = runner.batch.held, engine.model.settings.layout.blocks_for

        def read(
            self: DeviceDrafter, rows: Any, token_BA: Tensor, parents: Any, start_B: Tensor, *rest: Any
        ) -> Tensor:
            for b, own in enumerate(held):
                read_any.append(b)
                end = int(start_B[b]) + token_BA.shape[1]
                if own.request.finish_reason is None and blocks(end) > len(own.request.table_N):
                    outside.append((b, end))
            return inner(self, rows, token_BA, parents, start_B, *rest)

        monkeypatch.setattr(DeviceDrafter, "_read", read)
        for start in range(1, 18):
            engine.generate([list(range(1, 1 + start))], GREEDY.model_copy(update={"max_tokens": 9}))
    assert read_any and not outside


def test_what_fills_a_window_up_cannot_fail_a_row(folder: Path) -> None:
    """Token 0 gives NaN and is never sampled. One row drafts; the other's window is padded."""
    prompts, said = [[5, 6, 7, 8, 9] * 5, [11]], []
    for graphs in (False, True):
        fields = {"draft": "ngram", "adaptive": False, "max_model_len": 64, "graphs": graphs}
        with SpecEngine(folder, dtype="float64", **fields) as engine:
            engine.model.network.embed_VD[0] = torch.nan

            async def ask(prompt: list[int], engine: SpecEngine = engine) -> tuple[int, ...]:
                return tuple([t async for d in engine.stream(prompt, GREEDY) for t in d.token_ids])

            async def both(ask: Any = ask) -> list[Any]:
                return await asyncio.gather(*map(ask, prompts), return_exceptions=True)

            said.append(asyncio.run(both()))
    assert said[0] == said[1] and all(isinstance(own, tuple) for own in said[0])


def test_a_batch_goes_on_when_a_text_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished row becomes padding; the batch is reloaded only when half of the rows are left."""
    begun: list[int] = []
    inner = DeviceBatch.begin

    def begin(self: DeviceBatch, requests: Any, **reads: Any) -> bool:
        begun.append(len(requests))
        return inner(self, requests, **reads)

    monkeypatch.setattr(DeviceBatch, "begin", begin)
    params = [GREEDY.model_copy(update={"max_tokens": 6 + 4 * i}) for i in range(6)]
    prompts = [[1 + i, 2, 3] for i in range(6)]
    with SpecEngine(
        folder, dtype="float64", draft="mtp", graphs=True, adaptive=False, max_model_len=64
    ) as engine:
        begun.clear()
        found = engine.generate(prompts, params)
    with SpecEngine(folder, dtype="float64", draft="none", prefix_cache=False, max_model_len=64) as engine:
        assert [c.token_ids for c in engine.generate(prompts, params)] == [c.token_ids for c in found]
    assert begun[0] == 6 and len(begun) <= 4


@pytest.mark.parametrize(
    ("reload", "patience_s", "admitted"),
    [(0.0, 60.0, [9, 23]), (math.inf, 0.0, [9, 23]), (math.inf, 60.0, [])],
)
def test_waiting_requests_are_admitted_once_idle_rows_have_cost_enough_or_after_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reload: float, patience_s: float, admitted: list[int]
) -> None:
    begun: list[int] = []
    inner = DeviceBatch.begin

    def begin(self: DeviceBatch, requests: Any, **fields: Any) -> bool:
        begun.append(engine.stats().device_steps - first)
        return inner(self, requests, **fields)

    monkeypatch.setattr(DeviceBatch, "begin", begin)
    monkeypatch.setattr(runner, "RELOAD", reload)
    monkeypatch.setattr(runner, "PATIENCE_S", patience_s)
    lengths = [10, 25, *[60] * 22, 50, 50]  # 24 of these run
    params = [GREEDY.model_copy(update={"max_tokens": length}) for length in lengths]
    prompts = [[1 + i, 2, 3] for i in range(26)]
    with SpecEngine(
        folder, dtype="float64", draft="none", graphs=True, max_running=24, max_model_len=80
    ) as engine:
        begun.clear()
        first = engine.stats().device_steps
        engine.generate(prompts, params)
    assert [step for step in begun[1:] if step < 50] == admitted


def test_one_callers_blocked_request_does_not_delay_another_caller(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, ends = Scheduler._limit, Queue[str]()

    def limit(self: Scheduler, request: Request, lease: PrefixLease | None) -> str:
        """Make a long prompt wait for memory while anything runs."""
        return BLOCKS if len(request.tokens) == 30 and self.running else inner(self, request, lease)

    monkeypatch.setattr(Scheduler, "_limit", limit)
    monkeypatch.setattr(runner, "PATIENCE_S", 60.0)
    with SpecEngine(folder, dtype="float64", draft="none", graphs=True, max_model_len=250) as engine:
        runs = Event()

        def ask(caller: str, prompt: list[int], max_tokens: int) -> None:
            def emit(_: int, item: Any) -> None:
                runs.set()
                if isinstance(item, Exception) or item.finish_reason:
                    ends.put(f"{caller} {max_tokens}")

            params = GREEDY.model_copy(update={"max_tokens": max_tokens})
            engine.submit([engine.prepare(prompt, params, tenant=Tenant(caller))], emit)

        ask("alice", [1, 2, 3], 240)
        ask("alice", [*range(30)], 1)
        assert runs.wait(60)
        ask("bob", [4, 5, 6], 3)
        assert [ends.get(timeout=60) for _ in range(3)] == ["bob 3", "alice 240", "alice 1"]


@pytest.mark.parametrize("plans", [False, True])
def test_no_slots_are_borrowed_where_the_host_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plans: bool
) -> None:
    borrowed: dict[int, bool] = {}
    inner = DeviceBatch.begin

    def begin(self: DeviceBatch, requests: Any, **fields: Any) -> bool:
        loaded = inner(self, requests, **fields)
        borrowed[len(requests)] = any(own.sets or own.snapshots for own in self.held)
        return loaded

    monkeypatch.setattr(DeviceBatch, "begin", begin)
    monkeypatch.setattr(Policy, "plans_next", False)
    monkeypatch.setattr(TapedSteps, "pads", plans)
    with SpecEngine(folder, draft="mtp", dtype="float32", max_model_len=64) as engine:
        engine.generate([[1, 2, 3], [4, 5]], GREEDY)
        engine.generate([[1, 2, 3]], GREEDY)
    assert borrowed == {2: plans, 1: True}
