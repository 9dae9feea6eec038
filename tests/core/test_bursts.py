"""Concurrent requests with a common prefix: one prefills it, and the others wait for it."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.core.scheduler import PREFIXES, WORTH_WAITING, Scheduler
from tests.lossless.test_prefixes import DRAFTS, SETTINGS, VOCAB, folder
from tests.models.agreeing import END

__all__ = ["folder"]
STEM = 130
"""Over four chunks, and not a multiple of the block size."""
MANY = {**SETTINGS, "max_running": 8}


def burst(count: int, *, stem: int = STEM, vocab: int = VOCAB) -> list[list[int]]:
    """Make prompts with a common prefix."""
    draw = random.Random(5)
    begun = [draw.randrange(vocab) for _ in range(stem)]
    return [[*begun, number, *(draw.randrange(vocab) for _ in range(5 * number))] for number in range(count)]


def params(count: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=9, temperature=0.7 * (i % 2), seed=i) for i in range(count)]


@pytest.mark.parametrize("slots", ["record", "snapshot"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_what_a_burst_shares_is_read_once(folder: Path, draft: str, slots: str) -> None:
    prompts = burst(6)
    with SpecEngine(folder, draft="none", prefix_cache=False, **MANY) as engine:
        alone = [engine.generate([p], [own])[0].token_ids for p, own in zip(prompts, params(6), strict=True)]
    with SpecEngine(folder, slots=slots, **{**MANY, **DRAFTS[draft]}) as engine:
        done = engine.generate(prompts, params(6))
        assert engine.stats().limited_by[PREFIXES] and not engine.stats().failed_steps
    assert [own.token_ids for own in done] == alone
    assert not done[0].stats.cached_tokens
    assert all(STEM - WORTH_WAITING < own.stats.cached_tokens <= STEM for own in done[1:])


@pytest.mark.parametrize("draft", ["none", "suffix", "ngram"])
def test_a_model_without_states_shares_what_has_been_read(
    family_folder: Callable[..., Path], draft: str
) -> None:
    folder = family_folder("qwen3")
    prompts = burst(6, vocab=END)
    with SpecEngine(folder, draft="none", prefix_cache=False, **MANY) as engine:
        alone = [engine.generate([p], [own])[0].token_ids for p, own in zip(prompts, params(6), strict=True)]
    with SpecEngine(folder, draft=draft, **MANY) as engine:
        first, *others = engine.generate(prompts, params(6))
    assert [own.token_ids for own in (first, *others)] == alone
    assert not first.stats.cached_tokens
    assert all(STEM - WORTH_WAITING < own.stats.cached_tokens <= STEM for own in others)


def test_choices_of_one_prompt_read_it_once(folder: Path) -> None:
    (prompt,) = burst(1)
    with SpecEngine(folder, draft="mtp", **MANY) as engine:
        done = engine.generate([prompt], SamplingParams(max_tokens=6, n=5, seed=3))
    assert not done[0].stats.cached_tokens
    assert all(len(prompt) - WORTH_WAITING <= choice.stats.cached_tokens < len(prompt) for choice in done[1:])


@pytest.mark.parametrize("why", ["short", "salts", "scored", "other"])
def test_nobody_waits_for_nothing(folder: Path, why: str) -> None:
    prompts, own = burst(3, stem=40 if why == "short" else STEM), {"max_tokens": 3}
    asked = [SamplingParams(**own) for _ in prompts]
    if why == "salts":
        asked = [SamplingParams(cache_salt=salt, **own) for salt in "abc"]
    if why == "scored":
        asked = [SamplingParams(prompt_logprobs=1, **own) for _ in prompts]
    if why == "other":
        prompts = [[number, *prompt] for number, prompt in enumerate(prompts)]
    with SpecEngine(folder, draft="none", **MANY) as engine:
        engine.generate(prompts, asked)
        assert not engine.stats().limited_by.get(PREFIXES)


@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_who_waits_goes_on_when_the_reader_leaves(folder: Path, draft: str) -> None:
    prompts = burst(3)
    with SpecEngine(folder, draft="none", prefix_cache=False, **MANY) as engine:
        alone = [engine.generate([p], [own])[0].token_ids for p, own in zip(prompts, params(3), strict=True)]

    async def run(engine: SpecEngine) -> list[tuple[int, ...]]:
        async def leave() -> None:
            stream = engine.stream(prompts[0], params(3)[0])
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises((asyncio.CancelledError, StopAsyncIteration)):
                await reading

        async def stay(number: int) -> tuple[int, ...]:
            said: list[int] = []
            async for delta in engine.stream(prompts[number], params(3)[number]):
                said += delta.token_ids
            return tuple(said)

        _, *others = await asyncio.gather(leave(), stay(1), stay(2))
        return list(others)  # type: ignore[arg-type]

    with SpecEngine(folder, **{**MANY, "chunk_tokens": 8, **DRAFTS[draft]}) as engine:
        assert asyncio.run(run(engine)) == alone[1:]
        engine.flush()
        assert not engine.stats().arena.used_bytes and not engine.stats().failed_steps


def test_without_room_for_a_state_each_reads_for_itself(folder: Path) -> None:
    """If running requests need all memory, nothing is cached, and no request waits forever."""
    prompts = burst(6)
    small = {**MANY, "max_model_len": 176, "memory_bytes": 160_000}
    with SpecEngine(folder, draft="none", **small) as engine:
        done = engine.generate(prompts, params(6))
        assert engine.stats().limited_by[PREFIXES]
    assert not any(own.stats.cached_tokens for own in done)
    with SpecEngine(folder, draft="none", prefix_cache=False, **MANY) as engine:
        assert [own.token_ids for own in done] == [
            engine.generate([p], [own])[0].token_ids for p, own in zip(prompts, params(6), strict=True)
        ]


def test_a_burst_that_does_not_wait_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: all prefill at once."""
    monkeypatch.setattr(Scheduler, "_is_being_read", lambda *_: False)
    with SpecEngine(folder, draft="none", **MANY) as engine:
        done = engine.generate(burst(3), params(3))
    assert [own.stats.cached_tokens for own in done] != [0, STEM, STEM]
