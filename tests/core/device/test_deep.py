"""What is looked up goes deeper than a head drafts: steps on the device keep all of it."""

import pytest

from specdec import SamplingParams, SpecEngine

PROMPTS = ["def fib(n): return " * 6 + str(i) * (i % 4) for i in range(6)]


@pytest.mark.parametrize("slots", ["record", "snapshot"])
@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_deep_drafts_keep_their_whole_path(draft: str, slots: str) -> None:
    params = [
        SamplingParams(max_tokens=20 + 9 * i, seed=i, temperature=0.0, ignore_eos=True) for i in range(6)
    ]
    fields = {"dtype": "float64", "max_running": 8, "max_model_len": 512}
    with SpecEngine("tiny", draft="none", prefix_cache=False, **fields) as engine:
        wanted = [own.token_ids for own in engine.generate(PROMPTS, params)]
    with SpecEngine("tiny", draft=draft, graphs=True, slots=slots, **fields) as engine:
        found = [[own.token_ids for own in engine.generate(PROMPTS, params)] for _ in range(3)]
        assert found == [wanted] * 3 and engine.stats().failed_steps == 0
