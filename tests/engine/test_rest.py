"""A resting engine releases its arena, and later continues as before."""

import mmap
import threading
from collections.abc import Iterator, Sequence

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.config.drafters import DRAFTER_OPTIONS, NONE
from specdec.core.outputs import Delta
from specdec.errors import SpecdecError
from specdec.state_slots.integrity import IntegrityError

PROMPTS = ("def fib(n):\n", "import os\n\nclass Reader:\n", "for i in range(")
PARAMS = [
    SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=64, temperature=1.0, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, seed=3, top_k=20, ignore_eos=True),
]
SMALL = {"dtype": "float32", "memory_bytes": 48 << 20, "max_running": 4, "max_model_len": 512, "seed": 1}


class Listener:
    """A receiver of requests' deltas that rests the engine after the first few."""

    def __init__(self, engine: SpecEngine, params: Sequence[SamplingParams] = PARAMS, *, after: int) -> None:
        self.engine, self.after = engine, after
        self.tokens: list[list[int]] = [[] for _ in params]
        self.errors: list[SpecdecError] = []
        self.preemptions = [0] * len(params)
        self.over, self.rested, self._left = threading.Event(), threading.Event(), len(params)
        prepared = [engine.prepare(*each) for each in zip(PROMPTS, params, strict=False)]
        self.ticket = engine.submit(prepared, self._hear)

    def _hear(self, index: int, item: Delta | SpecdecError) -> None:
        if isinstance(item, SpecdecError):
            self.errors.append(item)
        else:
            self.tokens[index] += item.token_ids
            if item.stats:
                self.preemptions[index] = item.stats.preemptions
        self._left -= isinstance(item, SpecdecError) or item.finish_reason is not None
        self.after -= 1
        if self.after == 0:
            self.engine.begin_rest().add_done_callback(lambda _: self.rested.set())
        if not self._left:
            self.over.set()


@pytest.fixture(scope="module", params=[NONE, *DRAFTER_OPTIONS])
def drafting(request: pytest.FixtureRequest) -> Iterator[SpecEngine]:
    """Yield an engine that always drafts, with a host tier for prefixes if they include a state."""
    own = {} if request.param == NONE else {"adaptive": False, "num_steps": 3}
    try:
        engine = SpecEngine("tiny", draft=request.param, host_cache_bytes=8 << 20, **SMALL, **own)
    except SpecdecError as error:
        pytest.skip(str(error))
    with engine:
        yield engine


def test_texts_are_the_same_after_a_rest_in_mid_answer(drafting: SpecEngine) -> None:
    engine, arena = drafting, drafting.model.loop.arena
    plain = [list(done.token_ids) for done in engine.generate(PROMPTS, PARAMS)]
    heard = Listener(engine, after=5)
    assert heard.rested.wait(60)
    told = [len(token) for token in heard.tokens]
    assert arena.held == 0 and engine.stats().running == 0 and engine.stats().waiting
    assert not arena.data[:: 1 << 12].any(), "its bytes have been given back"
    assert [len(token) for token in heard.tokens] == told and not heard.over.is_set()
    engine.wake()
    assert heard.over.wait(60) and not heard.errors
    assert heard.tokens == plain
    assert sum(heard.preemptions) >= 1
    arena.check_integrity()
    assert not engine.is_catching_up


@pytest.fixture(scope="module")
def engine() -> Iterator[SpecEngine]:
    with SpecEngine("tiny", draft="mtp", adaptive=False, host_cache_bytes=16 << 20, **SMALL) as own:
        yield own


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_requests_and_cancellations_while_resting(engine: SpecEngine) -> None:
    plain = [list(done.token_ids) for done in engine.generate(PROMPTS, PARAMS)]
    heard = Listener(engine, after=2)
    assert heard.rested.wait(60)
    late = Listener(engine, after=-1)
    heard.ticket.cancel()
    assert heard.over.wait(60), "those that are cancelled end without being woken"
    assert not late.over.is_set() and engine.stats().waiting == len(PROMPTS)
    engine.rest()  # a second call changes nothing
    engine.wake()
    assert late.over.wait(60) and late.tokens == plain


def test_prefixes_return_from_the_lower_tier(engine: SpecEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = engine.model.loop.scheduler.cache
    assert cache
    monkeypatch.setattr(cache.rates, "pays", lambda *_: True)  # for so small a model prefill would be cheaper
    (turn,) = engine.generate("# a chat that goes on\n" * 4, PARAMS[0])
    both = [*turn.prompt_token_ids, *turn.token_ids, *turn.prompt_token_ids]
    engine.rest()
    engine.wake()
    (after,) = engine.generate(both, PARAMS[0])
    assert after.stats.cached_tokens >= len(turn.prompt_token_ids) + len(turn.token_ids) - 1
    engine.flush()
    (anew,) = engine.generate(both, PARAMS[0])
    assert not anew.stats.cached_tokens and anew.token_ids == after.token_ids


def test_its_pages_are_the_systems_again(engine: SpecEngine) -> None:
    data = engine.model.loop.arena.data
    engine.rest()
    empty = resident_bytes()
    address = data.data_ptr()
    data.fill_(1)
    assert resident_bytes() - empty > 0.9 * data.nbytes
    engine.rest()
    assert resident_bytes() - empty < 0.1 * data.nbytes
    assert data.data_ptr() == address and not data.any()
    engine.wake()


def test_a_failed_rest_ends_running_requests_only(
    engine: SpecEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, pause = engine.model.loop.scheduler, engine.model.loop.scheduler.pause
    (plain,) = engine.generate(PROMPTS[0], PARAMS[0])

    def fail() -> None:
        monkeypatch.setattr(scheduler, "pause", pause)
        raise RuntimeError("spoilt")

    monkeypatch.setattr(scheduler, "pause", fail)
    heard = Listener(engine, after=2)
    assert heard.rested.wait(60) and heard.over.wait(60)
    assert len(heard.errors) == len(PROMPTS) and "spoilt" in str(heard.errors[0])
    engine.wake()
    assert engine.generate(PROMPTS[0], PARAMS[0])[0].token_ids == plain.token_ids


def test_a_flush_that_its_caller_gives_up_ends_no_engine(
    engine: SpecEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled before it began, or while it was running."""
    begun, on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        begun.set()
        assert on.wait(60)

    monkeypatch.setattr(engine._worker._core, "flush", hold)
    first, second = engine.begin_flush(), engine.begin_flush()
    assert begun.wait(60) and not first.cancel() and second.cancel()
    on.set()
    first.result(60)
    assert engine.fault is None and engine.generate(PROMPTS[0], PARAMS[0])


def test_an_arena_that_holds_something_is_not_given_back(engine: SpecEngine) -> None:
    engine.flush()
    arena = engine.model.loop.arena
    (block,) = arena.take_blocks("someone", 1) or ()
    with pytest.raises(IntegrityError, match="someone"):
        arena.give_back()
    arena.release_blocks("someone", [block])
