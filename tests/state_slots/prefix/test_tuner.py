"""Tuning finds the value with more hits, keeps the current one on ties, and ends with its owner."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.prefix import tuner as module
from specdec.state_slots.prefix.replay import CacheReplay
from specdec.state_slots.prefix.tree import Ids
from specdec.state_slots.prefix.tuner import Tuner, coarse

LAYOUT = Layout((KVShape(2, 16),), (StateShape(4, 16, 16, 3, 96),), torch.bfloat16)
MEMORY = 60 * LAYOUT.slab_bytes
SHARED, LONG, SHORT = 4, 400, 20
Pair = tuple[Ids, Ids]


def work(tokens: int) -> float:
    return tokens * (100.0 + tokens)


def mixed(count: int) -> list[Pair]:
    """Make requests with recurring long prompts, and between them short ones that never recur."""
    rng = np.random.default_rng(3)
    long = [rng.integers(0, 9, LONG, np.int32) for _ in range(SHARED)]
    made = []
    for number in range(count):
        stem = long[number // 8 % SHARED] if number % 8 == 0 else rng.integers(10, 99, SHORT, np.int32)
        made.append((np.append(stem, np.int32(100 + number)), np.array([7, 7], np.int32)))
    return made


def alike(count: int) -> list[Pair]:
    """Make requests that fit in memory, whatever is evicted."""
    prompt = np.arange(30, dtype=np.int32)
    return [(prompt, np.array([number % 3], np.int32)) for number in range(count)]


def hits(alpha: float, pairs: list[Pair]) -> int:
    replay = CacheReplay(LAYOUT, MEMORY, work, alpha=alpha)
    return sum(replay.serve(prompt, np.concatenate([prompt, output])) for prompt, output in pairs)


def test_the_value_that_hits_more_is_taken() -> None:
    pairs = mixed(600)
    tuner = Tuner(LAYOUT, MEMORY, work)
    for pair in pairs:
        tuner.observe(*pair)
        if tuner.is_due:
            tuner.tune()
    assert tuner.alpha > 0
    assert hits(tuner.alpha, pairs) > 1.2 * hits(0.0, pairs)


def test_the_value_stays_if_no_other_is_better() -> None:
    said: list[float] = []
    tuner = Tuner(LAYOUT, MEMORY, work, on_change=said.append)
    for pair in alike(600):
        tuner.observe(*pair)
        if tuner.is_due:
            tuner.tune()
    assert len(tuner.trials[0].hits) >= module.EVIDENCE
    assert tuner.alpha == 0 and not said


def test_a_value_must_be_better_by_the_margin_twice_and_with_evidence() -> None:
    tuner = Tuner(LAYOUT, MEMORY, work, grid=(0.0, 1.0))
    plain, other = tuner.trials

    def tell(first: int, second: int, count: int = module.EVIDENCE) -> float:
        plain.hits.clear()
        other.hits.clear()
        plain.hits.extend([first] * count)
        other.hits.extend([second] * count)
        return tuner.tune()

    assert [tell(100, 104), tell(100, 104)] == [0.0, 0.0]
    assert [tell(100, 106), tell(100, 104), tell(100, 106), tell(100, 106)] == [0.0, 0.0, 0.0, 1.0]
    assert [tell(104, 100), tell(104, 100)] == [1.0, 1.0]
    assert [tell(106, 100, 9), tell(106, 100, 9)] == [1.0, 1.0]
    assert [tell(106, 100), tell(106, 100)] == [1.0, 0.0]


def test_a_thread_tunes_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE", 0.0)
    changed = threading.Event()
    tuner = Tuner(LAYOUT, MEMORY, work, grid=(0.0, 2.0), on_change=lambda _: changed.set())
    with closing(tuner):
        tuner.start()
        for pair in mixed(1500):
            tuner.observe(*pair)
        assert changed.wait(60)
        assert tuner.alpha == 2.0
        thread = tuner._thread
    tuner.close()
    assert thread and not thread.is_alive()


def test_closing_does_not_wait_for_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread sleeps for an hour after the first request: only a wake-up can end it."""
    monkeypatch.setattr(module, "IDLE", 1e9)
    served = threading.Event()
    right = CacheReplay.serve

    def serve(*args: object) -> int:
        served.set()
        return right(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(CacheReplay, "serve", serve)
    tuner = Tuner(LAYOUT, MEMORY, work)
    tuner.start()
    for pair in mixed(200):
        tuner.observe(*pair)
    assert served.wait(60)
    thread = tuner._thread
    tuner.close()
    assert thread and not thread.is_alive()
    assert sum(len(trial.hits) for trial in tuner.trials) < 200 * len(tuner.trials)


def test_a_failure_leaves_the_value(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise AssertionError("a bug")

    monkeypatch.setattr(CacheReplay, "serve", fail)
    tuner = Tuner(LAYOUT, MEMORY, work)
    tuner.start()
    thread = tuner._thread
    for pair in mixed(module.EVERY):
        tuner.observe(*pair)
    assert thread
    thread.join(60)
    assert not thread.is_alive() and tuner.alpha == 0
    assert "tuning has failed" in caplog.text
    tuner.close()


def test_the_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TOKENS", 100)
    tuner = Tuner(LAYOUT, MEMORY, work)
    for pair in alike(10):
        tuner.observe(*pair)
    assert tuner.left_out == 7
    tuner.tune()
    tuner.observe(*alike(1)[0])
    assert tuner.left_out == 7


def test_tokens_are_copied() -> None:
    tuner = Tuner(LAYOUT, MEMORY, work, grid=(0.0,))
    prompt, output = np.arange(40, dtype=np.int32), np.arange(3, dtype=np.int32)
    for _ in range(2):
        tuner.observe(prompt.copy(), output)
    tuner.observe(prompt, output)
    prompt[:] = 9
    tuner.tune()
    assert list(tuner.trials[0].hits) == [0, 0, 39]


def test_larger_blocks_cost_little_memory() -> None:
    large = Layout((KVShape(2, 16),), (StateShape(32, 128, 128, 3, 8192),), torch.bfloat16)
    assert coarse(large).block_tokens == 8 * large.block_tokens
    assert coarse(large).slab_bytes <= 1.02 * large.slab_bytes
    # No eight blocks of these make a slab: two at once would waste memory.
    assert coarse(LAYOUT).slab_bytes <= 1.02 * LAYOUT.slab_bytes
    plain = Layout((KVShape(2, 16),), (), torch.bfloat16)
    assert coarse(plain) == plain
