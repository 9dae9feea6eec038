"""Synthetic traces have their declared properties."""

from itertools import pairwise

import numpy as np
import pytest

from tools.bench.prefix.generate import KINDS, LONGEST, Trace, TraceTurn, generate


def made(name: str, seed: int, sessions: int) -> Trace:
    return generate(name, seed, sessions=sessions, vocab=32000)


def shown(trace: Trace) -> list[object]:
    return [[t.session, t.turn, t.ts, t.prompt.tolist(), t.output.tolist()] for t in trace.turns]


def whole(turn: TraceTurn) -> list[int]:
    return [*turn.prompt.tolist(), *turn.output.tolist()]


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_makes_one_trace(name: str) -> None:
    first, again, other = (made(name, seed, 4) for seed in (0, 0, 1))
    assert shown(first) == shown(again) != shown(other)
    assert all(len(turn.prompt) + len(turn.output) <= LONGEST for turn in first.turns)
    assert all(before.ts <= after.ts for before, after in pairwise(first.turns))


@pytest.mark.parametrize("name", KINDS)
def test_a_turn_continues_its_session(name: str) -> None:
    sessions: dict[str, list[TraceTurn]] = {}
    for turn in made(name, 2, 6).turns:
        sessions.setdefault(turn.session, []).append(turn)
    for turns in sessions.values():
        assert [turn.turn for turn in turns] == list(range(len(turns)))
        for before, after in pairwise(turns):
            said = whole(before)
            assert np.array_equal(after.prompt[: len(said)], said)
            assert len(after.prompt) > len(said)


def test_beginnings_are_shared() -> None:
    trace = made("system-prompts", 0, 300)
    beginnings = {turn.prompt[:50].tobytes() for turn in trace.turns if len(turn.prompt) > 400}
    assert 2 <= len(beginnings) <= 4
    agents = made("agents", 0, 5)
    assert len({turn.prompt[:1800].tobytes() for turn in agents.turns}) == 1


def test_lengths_are_scaled_and_bounded() -> None:
    small = generate("agents", 0, sessions=5, vocab=300, scale=1 / 8, most=2000)
    assert max(len(turn.prompt) + len(turn.output) for turn in small.turns) <= 2000
    assert max(max(whole(turn)) for turn in small.turns) < 300
    assert len({turn.prompt[:225].tobytes() for turn in small.turns}) == 1
    assert len({turn.prompt[:235].tobytes() for turn in small.turns}) > 1
