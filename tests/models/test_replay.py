"""Passes replayed from a tape give the numbers of ordinary passes, to the last bit."""

import gc
import weakref
from typing import Any

import pytest
import torch

from specdec import Completion, SamplingParams, SpecEngine
from specdec.kernels.native import tape
from specdec.kernels.native.compiled import compiled
from specdec.models.replay import Recorded, Replays
from tests.selection import EXHAUSTIVE, only

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no C compiler")
PROMPTS = ["import os\n\ndef read(path):\n", "class A:", "x = [1, 2, 3]\n" * 12]
MODES: dict[str, dict[str, Any]] = {
    "none": {"draft": "none"},
    "chain": {"draft": "mtp", "adaptive": False, "num_steps": 4, "topk": 1},
    "tree": {"draft": "mtp", "adaptive": False, "num_steps": 3, "topk": 3, "num_draft_tokens": 9},
    "eagle": {"draft": "eagle", "adaptive": False, "num_steps": 3, "topk": 1},
    "suffix": {"draft": "suffix", "adaptive": False, "num_steps": 5, "topk": 1},
    "window": {"draft": "mtp", "adaptive": False, "num_steps": 3, "topk": 1, "draft_window": 20},
}


def answers(mode: str, **more: Any) -> list[Completion]:
    settings = {"max_model_len": 400, "max_running": 3, "dtype": "bfloat16", **MODES[mode], **more}
    with SpecEngine("tiny", **settings) as engine:
        alone = [
            engine.generate([prompt], SamplingParams(max_tokens=36, temperature=t, seed=3, logprobs=2))[0]
            for prompt in PROMPTS
            for t in (0.0, 1.0)
        ]
        params = SamplingParams(max_tokens=30, temperature=0.8, seed=5, logprobs=2)
        return [*alone, *engine.generate(PROMPTS, params)]


REFUSING: dict[str, dict[str, Any]] = {
    "torch's attention in float32": {"dtype": "float32"},
    "keys of 8 bits": {"dtype": "bfloat16", "kv_dtype": "fp8"},
    "torch's attention": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (mode, why)
        for why in REFUSING
        for mode in (("none", "tree") if why == "torch's attention" else ("chain",))
    ],
)
@EXHAUSTIVE
def test_a_pass_that_cannot_be_taped_still_computes_during_recording(why: str, mode: str) -> None:
    """Texts long enough to use all attention threads; each is requested several times, next to others."""
    shared = {"max_model_len": 1200, "max_running": 3, "prefix_cache": False}
    settings = {**shared, **MODES[mode], **REFUSING[why]}
    prompts = [[7 * i % 3000 + 1 for i in range(length)] for length in (60, 130, 1020)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    with SpecEngine("tiny", **settings) as engine:
        alone = [[told(engine.generate([p], params)[0]) for p in prompts] for _ in range(3)]
        together = [[told(own) for own in engine.generate(prompts, params)] for _ in range(3)]
    # Attending to a wrong position is off by tenths; memory alignment changes only the last bits.
    near = 1e-4 if settings["dtype"] == "float32" else 0.05
    for rounds in (alone, together):
        for found in rounds[1:]:
            for own, first in zip(found, rounds[0], strict=True):
                assert own == pytest.approx(first, abs=near)
    if settings["dtype"] == "float32":
        with SpecEngine("tiny", dtype="float32", kernels="cpu", draft="none", max_model_len=1200) as engine:
            assert told(engine.generate(prompts[-1:], params)[0]) == pytest.approx(alone[0][-1], abs=near)


def told(done: Completion) -> list[float]:
    assert done.logprobs is not None
    return [logprob.logprob for logprob in done.logprobs]


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often a tape is replayed."""
    played, inner = [0], Recorded.play

    def play(self: Recorded, *given: Any) -> tuple[torch.Tensor, ...]:
        played[0] += 1
        return inner(self, *given)

    monkeypatch.setattr(Recorded, "play", play)
    return played


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("mode", "slots", "dtype"),
    only(
        lambda case: case[0] in ("none", "chain", "tree") and case[2] == "bfloat16",
        [
            *((mode, "record", "bfloat16") for mode in MODES),
            *((mode, "snapshot", "bfloat16") for mode in ("none", "tree", "suffix")),
            *((mode, "record", "float32") for mode in ("chain", "tree", "eagle")),
        ],
    ),
)
def test_a_replay_equals_a_run(mode: str, slots: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    played = counting(monkeypatch)
    taped = answers(mode, slots=slots, dtype=dtype)
    assert played[0] > 50
    before = Replays.__init__

    def never(self: Replays, *given: Any, **options: Any) -> None:
        before(self, *given, **options)
        self.serves = False

    monkeypatch.setattr(Replays, "__init__", never)
    played[0] = 0
    run = answers(mode, slots=slots, dtype=dtype)
    assert played[0] == 0
    assert [own.token_ids for own in taped] == [own.token_ids for own in run]
    assert [own.logprobs for own in taped] == [own.logprobs for own in run]


def test_a_tape_goes_with_its_arena() -> None:
    """Engines of one network have separate tapes, which do not keep an arena alive."""
    with SpecEngine("tiny", draft="mtp", max_model_len=128, dtype="bfloat16") as engine:
        network, loop = engine.model.network, engine.model.loop
        engine.generate(["import os"], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
        tapes = network._replays._by_memory
        assert len(tapes) == 1 and list(tapes) == [loop.arena]
        arena = weakref.ref(loop.arena)
        del loop
    del engine
    gc.collect()
    assert arena() is None and len(tapes) == 0


def test_oversized_steps_are_recorded_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, inner = [0], Recorded.record

    def record(self: Recorded, *given: Any) -> tuple[torch.Tensor, ...]:
        recorded[0] += 1
        return inner(self, *given)

    monkeypatch.setattr(Recorded, "record", record)
    monkeypatch.setattr(tape, "MOST_BYTES", 1)
    with SpecEngine("tiny", draft="none", max_model_len=128, dtype="bfloat16") as engine:
        for _ in range(3):
            engine.generate(["import os"], SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    assert 0 < recorded[0] <= 6


def test_unused_tapes_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = answers("chain")
    monkeypatch.setattr(tape, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(tape, "MOST_KEYS", 4)
    played = counting(monkeypatch)
    found = answers("chain")
    assert played[0] > 0
    assert [own.logprobs for own in found] == [own.logprobs for own in wanted]
