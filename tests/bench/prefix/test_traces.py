"""Traces survive a file, and those that are made up are what they are said to be."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from specdec.bench.prefix.generate import KINDS, LONGEST, generate
from specdec.bench.prefix.traces import Trace, Turn, read_trace, write_trace
from specdec.errors import ConfigError

GOOD = {"session_id": 3, "turn_id": 0, "ts": 1.5, "input_tokens": [1, 2], "output_tokens": [3]}


def shown(trace: Trace) -> list[object]:
    return [[t.session, t.turn, t.ts, t.prompt.tolist(), t.output.tolist()] for t in trace.turns]


def sessions(trace: Trace) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = {}
    for turn in trace.turns:
        found.setdefault(turn.session, []).append(turn)
    return found


def test_a_trace_survives_a_file(tmp_path: Path) -> None:
    trace = generate("lmsys", 1, sessions=3)
    write_trace(trace, tmp_path / "own.jsonl")
    found = read_trace(tmp_path / "own.jsonl")
    assert found.name == "own" and shown(found) == shown(trace)


def test_lines_may_come_in_any_order(tmp_path: Path) -> None:
    lines = [{**GOOD, "ts": at, "turn_id": turn} for turn, at in ((1, 2), (0, 2.0), (2, 0))]
    (tmp_path / "t.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    assert [turn.turn for turn in read_trace(tmp_path / "t.jsonl").turns] == [2, 0, 1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "it is no object"),
        ({"session_id": None}, "session_id is null; it must be a text or an integer"),
        ({"turn_id": "1"}, 'turn_id is "1"; it must be an integer'),
        ({"turn_id": float("inf")}, "turn_id is Infinity; it must be"),
        ({"ts": float("nan")}, "ts is NaN; it must be a number of seconds from 0 on"),
        ({"ts": -1}, "ts is -1; it must be"),
        ({"ts": 10**400}, "ts is 10*[.]{3}; it must be"),
        ({"ts": None}, "ts is null; it must be"),
        ({"input_tokens": []}, r"input_tokens is \[\]; it must be a list of token ids"),
        ({"output_tokens": []}, r"output_tokens is \[\]; it must be"),
        ({"input_tokens": [1.5]}, "input_tokens is"),
        ({"input_tokens": [1 << 40]}, "input_tokens is"),
        ({"input_tokens": [-1]}, "input_tokens is"),
        ({"output_tokens": "text"}, "output_tokens is"),
        ({}, 'session_id "3" with turn_id 0 is in line 1 already'),
        *((name, f"{name} is missing; it must be") for name in GOOD),
    ],
)
def test_what_is_no_request_is_named_by_line_and_field(
    tmp_path: Path, line: str | dict[str, object], said: str
) -> None:
    if isinstance(line, dict):
        line = json.dumps({**GOOD, "turn_id": 1, **line} if line else GOOD)
    elif line in GOOD:
        line = json.dumps({name: value for name, value in GOOD.items() if name != line})
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(ConfigError, match=f"--file: .*t.jsonl, line 2: {said}"):
        read_trace(path)


def test_a_path_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        read_trace(tmp_path / "none.jsonl")
    assert str(found.value).count("none.jsonl") == 1 and "Errno" not in str(found.value)
    (tmp_path / "t.jsonl").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not in UTF-8"):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize("name", ["session_id", "turn_id", "ts", "input_tokens", "output_tokens"])
def test_a_digest_is_of_every_field(tmp_path: Path, name: str) -> None:
    other = {"session_id": 4, "turn_id": 1, "ts": 2, "input_tokens": [1], "output_tokens": [4]}
    found = []
    for line in (GOOD, GOOD, {**GOOD, name: other[name]}):
        (tmp_path / "t.jsonl").write_text(json.dumps(line))
        found.append(read_trace(tmp_path / "t.jsonl").digest())
    assert found[0] == found[1] != found[2]


def test_a_file_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    for path in (tmp_path / "t.jsonl", tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=r"--file"):
            read_trace(path)


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_makes_one_trace(name: str) -> None:
    first, again, other = (generate(name, seed, sessions=4) for seed in (0, 0, 1))
    assert shown(first) == shown(again) != shown(other)
    assert all(len(turn.whole) <= LONGEST for turn in first.turns)
    assert all(before.ts <= after.ts for before, after in pairwise(first.turns))


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.collapses])
def test_a_turn_goes_on_from_what_was_said(name: str) -> None:
    for turns in sessions(generate(name, 2, sessions=6)).values():
        assert [turn.turn for turn in turns] == list(range(len(turns)))
        for before, after in pairwise(turns):
            assert np.array_equal(after.prompt[: len(before.whole)], before.whole)
            assert len(after.prompt) > len(before.whole)


def test_an_agent_that_shortens_what_it_has_seen_loses_the_oldest_observations() -> None:
    kept, cut = (generate(name, 2, sessions=6) for name in ("agents", "agents-collapsed"))
    assert max(len(t.prompt) for t in cut.turns) < max(len(t.prompt) for t in kept.turns)
    for turns in sessions(cut).values():
        for before, after in pairwise(turns):
            whole = np.array_equal(after.prompt[: len(before.whole)], before.whole)
            assert whole == (before.turn < 5)


def test_beginnings_are_shared() -> None:
    trace = generate("system-prompts", 0, sessions=300)
    beginnings = {turn.prompt[:50].tobytes() for turn in trace.turns if len(turn.prompt) > 400}
    assert 2 <= len(beginnings) <= 4
    agents = generate("agents", 0, sessions=5)
    assert len({turn.prompt[:1800].tobytes() for turn in agents.turns}) == 1


def test_lengths_are_scaled_and_bounded() -> None:
    small = generate("agents", 0, sessions=5, vocab=300, scale=1 / 8, most=2000)
    assert max(len(turn.whole) for turn in small.turns) <= 2000
    assert max(int(turn.whole.max()) for turn in small.turns) < 300
    assert len({turn.prompt[:225].tobytes() for turn in small.turns}) == 1
    assert len({turn.prompt[:235].tobytes() for turn in small.turns}) > 1
