"""Every token has its origin on every path, and the statistics agree."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from specdec import Completion, Delta, RequestStats, SamplingParams, SpecEngine
from specdec.core.batch import ScheduledRequest
from specdec.verify.walk import AcceptedPath
from tests.lossless.cases import SHAPES, drafting_engine, generate, plain_cases, preempt_each
from tests.models.agreeing import END

COUNT = 10
MODES: dict[str, dict[str, Any]] = {
    "none": {"draft": "none"},
    "chain": {"draft": "mtp", "adaptive": False, **SHAPES["chain"]},
    "tree": {"draft": "mtp", "adaptive": False, **SHAPES["tree"]},
    "suffix": {"draft": "suffix", "adaptive": False, **SHAPES["tree"]},
    "auto": {"draft": "auto"},
    "device chain": {"draft": "mtp", "adaptive": False, "graphs": True, **SHAPES["chain"]},
    "device tree": {"draft": "mtp", "adaptive": False, "graphs": True, **SHAPES["tree"]},
    "device suffix": {"draft": "suffix", "adaptive": False, "graphs": True, **SHAPES["tree"]},
    "synthetic": {"draft": "mtp", "adaptive": False, "num_steps": 4, "synthetic_acceptance": 2.7},
}


def accepted_by_depth(stats: RequestStats) -> Counter[int]:
    """Return the accepted draft tokens by depth, from the histogram."""
    found = Counter[int]()
    for accepted, steps in stats.histogram.items():
        found.update(dict.fromkeys(range(1, accepted + 1), steps))
    return found


def disagreements(done: Iterable[Completion]) -> list[str]:
    """List the differences between origins and statistics."""
    wrong = []
    for i, own in enumerate(done):
        drafted = Counter(origin for origin in own.origins if origin)
        if len(own.origins) != len(own.token_ids):
            wrong.append(f"{i}: {len(own.origins)} origins of {len(own.token_ids)} tokens")
        if drafted != accepted_by_depth(own.stats) or drafted.total() != own.stats.accepted:
            wrong.append(f"{i}: {drafted} where the histogram is {own.stats.histogram}")
        # A depth follows the previous one; the first token is the target's.
        if any(b not in (0, a + 1) for a, b in zip((0, *own.origins), own.origins, strict=False)):
            wrong.append(f"{i}: {own.origins}")
    return wrong


def ask(engine: SpecEngine, **changes: Any) -> list[Completion]:
    prompts = [[(7 * i + 3 * j) % END for j in range(1 + i % 5)] for i in range(COUNT)]
    params = [
        SamplingParams(**{"max_tokens": 9 + i, "temperature": 0.0, "ignore_eos": True, **changes})
        for i in range(COUNT)
    ]
    return engine.generate(prompts, params)


@pytest.mark.parametrize("mode", MODES)
def test_origins_and_statistics_are_one(folder: Path, mode: str) -> None:
    with SpecEngine(folder, dtype="float64", **MODES[mode]) as engine:
        done = [*ask(engine), *ask(engine, temperature=0.8, seed=3, n=2)]
    assert disagreements(done) == []
    origins = {origin for own in done for origin in own.origins}
    assert (
        origins == {0} if mode == "none" else mode in ("auto", "suffix", "device suffix") or max(origins) > 2
    )


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("rate", "expected"), [(1.0, (0, 1, 2, 3) * 6), (0.0, (0,) * 21)])
def test_a_drafter_that_is_always_right_or_never(
    folder: Path, rate: float, expected: tuple[int, ...], graphs: bool
) -> None:
    fields: dict[str, Any] = {"num_steps": 3, "synthetic_acceptance": [rate] * 3, "graphs": graphs}
    params = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
    with SpecEngine(folder, dtype="float64", draft="mtp", adaptive=False, **fields) as engine:
        (own,) = engine.generate([5], params)
    # The first token is from prefill, and each step's last is the target's.
    assert own.origins == (0, *expected[1:21]) and own.stats.drafted > 0


@pytest.mark.parametrize("graphs", [False, True])
def test_stops_limits_choices_and_preemption_cut_origins_with_their_tokens(
    folder: Path, graphs: bool
) -> None:
    cases = plain_cases(folder)
    with drafting_engine(folder, "oracle", cases, rate=0.9, graphs=graphs, **SHAPES["tree"]) as (
        engine,
        seen,
    ):
        preempt_each(engine)
        found = [own for some in generate(engine, cases) for own in some]
        assert engine.stats().preemptions > 0
    assert disagreements(found) == []
    assert graphs or seen.overshot > 0


def test_an_origin_that_is_wrong_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the bonus token counted as a draft."""

    def all_drafted(self: ScheduledRequest, path: AcceptedPath) -> list[int]:
        return [i + 1 for i in range(len(path.emitted))]

    monkeypatch.setattr(ScheduledRequest, "origins", all_drafted)
    with SpecEngine(folder, dtype="float64", **MODES["chain"]) as engine:
        assert len(disagreements(ask(engine))) >= COUNT


def test_deltas_carry_their_tokens_origins_and_pieces(folder: Path) -> None:
    async def heard(engine: SpecEngine, params: SamplingParams) -> list[Delta]:
        return [delta async for delta in engine.stream([5, 1], params)]

    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with SpecEngine(folder, dtype="float64", **MODES["tree"]) as engine:
        deltas = asyncio.run(heard(engine, params))
        (whole,) = engine.generate([[5, 1]], params)
    for delta in deltas:
        assert len(delta.origins) == len(delta.token_ids)
        assert "".join(piece.text for piece in delta.pieces) == delta.text
        # A token is one letter here, except the end token, which has no text.
        shown = [o for t, o in zip(delta.token_ids, delta.origins, strict=True) if t != END]
        assert [piece.origin for piece in delta.pieces] == shown
    assert tuple(origin for delta in deltas for origin in delta.origins) == whole.origins
    assert max(whole.origins) > 0
