"""Groups of processes write the texts of one process, and end together."""

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from specdec import SamplingParams, SpecEngine
from specdec.bench.agreement import last_logits
from specdec.core.parallel.commands import Operation
from specdec.core.parallel.executor import LeaderExecutor
from specdec.errors import ConfigError, EngineError

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3, [5, 6, 7] * 10, [9, 8, 9, 8, 9, 8, 9])
PARAMS = [
    SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True, speculate=speculate)
    for temperature in (0.0, 0.8)
    for speculate in (False, True)
]
COMMON: Mapping[str, Any] = {
    **{"device": "cpu", "dtype": "float64", "kernels": "cpu", "memory_bytes": "16MiB"},
    **{"adaptive": False, "num_steps": 3, "topk": 2, "num_draft_tokens": 6, "chunk_tokens": 16},
}


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def texts(engine: SpecEngine) -> list[tuple[int, ...]]:
    """Return the tokens of several batches; the last prompts continue the first, from the prefix cache."""
    found: list[tuple[int, ...]] = []
    for params in PARAMS:
        found += [done.token_ids for done in engine.generate(PROMPTS, params)]
        found += [done.token_ids for done in engine.generate([[*PROMPTS[0], 11, 12]], params)]
    return found


@pytest.mark.parametrize(
    ("family", "ranks", "settings"),
    [
        ("qwen3_5", 2, {"draft": "mtp"}),
        ("qwen2", 4, {"draft": "eagle"}),
        ("nemotron_h", 2, {"draft": "suffix", "slots": "snapshot"}),
    ],
)
def test_texts_equal_those_of_one_rank(
    family_folder: Callable[[str], Path], family: str, ranks: int, settings: Mapping[str, Any]
) -> None:
    with SpecEngine(family_folder(family), **COMMON, **settings, graphs=False) as engine:
        expected, alone = texts(engine), engine.model.loop.arena.layout
        logits_TV = last_logits(engine.model, PROMPTS[0], 3)
    with SpecEngine(family_folder(family), **COMMON, **settings, tp=ranks) as engine:
        assert texts(engine) == expected
        torch.testing.assert_close(last_logits(engine.model, PROMPTS[0], 3), logits_TV)
        stats, layout = engine.stats(), engine.model.loop.arena.layout
        assert stats.accepted and stats.prefixes and stats.prefixes.hit
        assert layout.state_bytes * ranks == alone.state_bytes
        processes = _executor(engine).group.processes
    assert len(processes) == ranks - 1 and all(process.poll() is not None for process in processes)


@pytest.mark.usefixtures("four_threads")
def test_ranks_divide_the_threads_of_their_engine_only(folder: Path) -> None:
    for _ in range(2):
        with SpecEngine(folder, **COMMON, draft="suffix", tp=2) as engine:
            assert engine._worker.between_steps(torch.get_num_threads).result() == 2
            assert torch.get_num_threads() == 4


def test_ranks_run_no_code_of_the_current_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "specdec", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of a checkpoint was run')")
    monkeypatch.chdir(tmp_path)
    with SpecEngine(folder, **COMMON, draft="suffix", tp=2) as engine:
        assert engine.generate(PROMPTS[:1], PARAMS[0])


def test_an_idle_engine_stops_when_a_rank_is_killed(folder: Path) -> None:
    with SpecEngine(folder, **COMMON, draft="suffix", tp=2) as engine:
        _executor(engine).group.processes[0].kill()
        engine._worker._thread.join(10)
        with pytest.raises(EngineError, match=r"tp: rank 1 \(process \d+\) ended with code -9"):
            engine.generate(PROMPTS, PARAMS[0])


def test_waiting_requests_end_too_when_a_rank_is_killed_in_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SpecEngine(folder, **COMMON, draft="suffix", tp=2, max_running=1) as engine:
        group, inbox = _executor(engine).group, engine._worker._inbox

        def kill(command: bytes) -> None:
            group.processes[0].kill()
            while inbox.empty():  # until the watching thread has reported it as well
                time.sleep(0.01)
            raise BrokenPipeError

        monkeypatch.setattr(group.connections[0], "send_bytes", kill)
        answers = SimpleQueue[object]()
        prepared = [engine.prepare(prompt, PARAMS[0]) for prompt in PROMPTS]
        engine.submit(prepared, lambda _, answer: answers.put(answer))
        assert all(isinstance(answers.get(timeout=60), EngineError) for _ in PROMPTS)


class Altered:
    """A connection that tells its rank another last token, as a mutant."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send_bytes(self, command: bytes) -> None:
        values = array("q", command)
        if values[0] == Operation.FORWARD:
            values[6] += 1  # after the operation, four numbers, and the count of tokens
        self._connection.send_bytes(values.tobytes())


def test_a_rank_that_runs_another_token_stops_the_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SpecEngine(folder, **COMMON, draft="suffix", tp=2) as engine:
        group = _executor(engine).group
        monkeypatch.setattr(group, "connections", [Altered(group.connections[0])])
        with pytest.raises(EngineError, match="rank 1 has run other tokens, or computed other numbers"):
            engine.generate(PROMPTS, PARAMS[0])
        engine._worker._thread.join(10)
        assert group.processes[0].wait(10) != 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 3}, "tp: 3 ranks cannot share 2 key heads evenly; lower tp to a divisor of 2"),
        ({"graphs": True}, "graphs: it does not work with tp=2 yet; leave it out, or use tp=1"),
        ({"quantize": "int8"}, "quantize: it does not work with tp=2 yet; leave it out, or use tp=1"),
        ({"draft": "self-int4"}, "draft: it does not work with tp=2 yet; use another drafter, or use tp=1"),
        ({"host_cache_bytes": "1MiB"}, "host_cache_bytes: it does not work with tp=2 yet; leave it out"),
    ],
)
def test_unsupported_settings_are_refused_before_processes_start(
    folder: Path, settings: Mapping[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("specdec.setup.build.start_ranks", start)
    with pytest.raises(ConfigError, match=message):
        SpecEngine(folder, device="cpu", **{"tp": 2, **settings})


def _executor(engine: SpecEngine) -> LeaderExecutor:
    executor = engine.model.loop.executor
    assert isinstance(executor, LeaderExecutor)
    return executor
