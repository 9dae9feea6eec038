"""With `tiny`, the second prompt with a long prefix hits the prefix cache and its text stays the same."""

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.state_slots.prefix.rates import TierRates


def test_the_second_of_five_long_prompts_hits_and_texts_stay() -> None:
    stem = [5 + i * i % 500 for i in range(1351)]
    prompts = [[*stem, 100 + i, 7, 8] for i in range(3)]
    params, texts, hits = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True), [], []
    for prefix_cache in (False, True):
        with SpecEngine("tiny", dtype="float32", draft="none", prefix_cache=prefix_cache) as engine:
            done = [engine.generate([prompt], params)[0] for prompt in prompts]
        texts.append([own.token_ids for own in done])
        hits.append([own.stats.cached_tokens for own in done])
    assert texts[0] == texts[1]
    assert hits == [[0, 0, 0], [0, 1024, 1351]]


def test_the_second_chat_with_a_system_prompt_hits_and_texts_stay() -> None:
    params, texts, hits = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True), [], []
    for draft, prefix_cache in (("none", False), ("auto", False), ("auto", True)):
        with SpecEngine("tiny", dtype="float32", draft=draft, prefix_cache=prefix_cache) as engine:
            (eos, *_) = engine.model.core.eos
            system = [*(5 + i * i % 500 for i in range(150)), eos]
            prompts = [[*system, *(first + i % 7 for i in range(149)), eos, 7, 8] for first in (20, 40, 40)]
            done = [engine.generate([prompt], params)[0] for prompt in prompts]
        texts.append([own.token_ids for own in done])
        hits.append([own.stats.cached_tokens for own in done])
    assert texts[0] == texts[1] == texts[2]
    assert hits == [[0, 0, 0], [0, 0, 0], [0, 151, 301]]


def test_the_speed_of_prefill_is_not_taken_from_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate decides whether copying a prefix is faster; a step of one token takes as long as of 30."""
    seen = list[float]()
    monkeypatch.setattr(TierRates, "observe_prefill", lambda _, work, seconds: seen.append(work))
    with SpecEngine("tiny", dtype="float32", draft="none") as engine:
        work = engine.model.loop.prefixes.cache.score.work
        engine.generate([[5 + i * i % 500 for i in range(300)]], SamplingParams(max_tokens=2))
    assert seen == [work(299)]
