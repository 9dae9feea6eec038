"""Two engines answer alike, one from cached prefixes; a wrong state withholds figures."""

import json
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pytest

from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.lease import PrefixHit, PrefixLease
from tools.bench.__main__ import main
from tools.bench.prefix import engine
from tools.bench.prefix.generate import TraceTurn

Bench = Callable[..., int]


def turn(session: str) -> TraceTurn:
    ids = np.zeros(1, np.int32)
    return TraceTurn(session, 0, 0.0, ids, ids)


@pytest.fixture
def bench(hybrid: Path) -> Bench:
    def call(*more: str) -> int:
        settings = ["--dtype", "float64", "--max-model-len", "256", "--draft", "none", "--max-running", "4"]
        return main(["prefix", str(hybrid), "--requests", "16", *settings, "--json", *more])

    return call


def test_texts_are_alike_and_hits_are_counted(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench("--trace", "system-prompts,lmsys,agents", "--out", str(tmp_path / "made")) == 0
    captured = capsys.readouterr()
    shown, report = captured.err, json.loads(captured.out)
    assert json.loads((tmp_path / "made" / engine.RESULT).read_text()) == report
    assert [r["trace"] for r in report["records"]] == ["system-prompts", "lmsys", "agents"]
    for record in report["records"]:
        assert record["requests"] and record["differing_texts"] == 0
        assert 0.2 < record["hit_rate"] < 1
        assert set(record["ttft_off_s"]) == set(record["ttft_on_s"]) == {"p50", "p95"}
    assert all(len(line) <= 130 for line in shown.splitlines())


def test_groups_hold_several_turns_but_one_per_session(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    right = engine.SpecEngine.generate

    def generate(self: engine.SpecEngine, prompts: list[list[int]], *args: object) -> object:
        asked.append(len(prompts))
        return right(self, prompts, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.SpecEngine, "generate", generate)
    assert bench("--trace", "system-prompts,agents", "--together", "5") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["together"] == 5 and sum(asked) == 2 * (sum(r["requests"] for r in report["records"]) + 6)
    assert 5 in asked and max(asked) == 5
    assert all(record["differing_texts"] == 0 and record["hit_rate"] > 0.2 for record in report["records"])


def test_a_group_ends_before_the_next_turn_of_a_session() -> None:
    turns = [turn(session) for session in "abcabbd"]
    found = [[own.session for own in group] for group in engine.groups(turns, 3)]
    assert found == [["a", "b", "c"], ["a", "b"], ["b", "d"]]


def test_a_wrong_state_withholds_every_figure(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PrefixCache.lend

    def lend(cache: PrefixCache, owner: Hashable, lease: PrefixLease, state: int | None) -> PrefixHit:
        hit = right(cache, owner, lease, state)
        if state is not None:
            cache.arena.state_bytes_X(state).zero_()
        return hit

    monkeypatch.setattr(PrefixCache, "lend", lend)
    assert bench("--trace", "system-prompts") != 0
    said = capsys.readouterr()
    assert not said.out and "answered otherwise" in said.err


def test_both_take_turns_at_being_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    right = engine.SpecEngine.generate

    def generate(self: engine.SpecEngine, *args: object) -> object:
        asked.append(self.config.prefix_cache)
        return right(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.SpecEngine, "generate", generate)
    assert bench("--trace", "system-prompts") == 0
    counted = asked[2 * engine.WARMUP :]
    pairs = list(zip(counted[::2], counted[1::2], strict=True))
    assert pairs[:4] == [(True, False), (False, True)] * 2


@pytest.mark.parametrize("policy", [("lru",), ("flops", "--prefix-alpha", "2", "--host-cache-bytes", "1MB")])
def test_settings_of_the_cache_are_those_of_the_engine_that_has_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, policy: tuple[str, ...]
) -> None:
    asked: dict[bool, str] = {}
    right = engine.SpecEngine.generate

    def generate(self: engine.SpecEngine, *args: object) -> object:
        asked[self.config.prefix_cache] = self.config.prefix_policy
        return right(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.SpecEngine, "generate", generate)
    assert bench("--prefix-policy", *policy) == 0
    assert asked == {False: "tuned", True: policy[0]}


@pytest.mark.parametrize(("calls", "records"), [(2 * engine.WARMUP + 7, 1), (1, 0)])
def test_results_before_ctrl_c_are_shown(
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
    records: int,
) -> None:
    asked = 0
    right = engine.SpecEngine.generate

    def generate(self: engine.SpecEngine, *args: object) -> object:
        nonlocal asked
        asked += 1
        if asked == calls:
            raise KeyboardInterrupt
        return right(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.SpecEngine, "generate", generate)
    assert bench() == 130
    captured = capsys.readouterr()
    shown = captured.err
    if records:
        report = json.loads(captured.out)
        assert report["interrupted"] and "INTERRUPTED" in shown
        assert [record["requests"] for record in report["records"]] == [3]
    else:
        assert not shown
