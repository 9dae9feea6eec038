"""Look-up drafts go deeper than a head's drafts: device steps use their full depth."""

import pytest

from specdec import SamplingParams, SpecEngine
from tests.selection import EXHAUSTIVE, only

PROMPTS = ["def fib(n): return " * 6 + str(i) * (i % 4) for i in range(6)]


PARAMS = [SamplingParams(max_tokens=20 + 7 * i, seed=i, temperature=0.0, ignore_eos=True) for i in range(6)]
FIELDS = {"dtype": "float64", "max_running": 8, "max_model_len": 512}


@pytest.fixture(scope="module")
def wanted() -> list[tuple[int, ...]]:
    with SpecEngine("tiny", draft="none", prefix_cache=False, **FIELDS) as engine:
        return [own.token_ids for own in engine.generate(PROMPTS, PARAMS)]


@EXHAUSTIVE
@pytest.mark.parametrize("slots", only({"record"}, ["record", "snapshot"]))
@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_deep_drafts_keep_their_whole_path(wanted: list[tuple[int, ...]], draft: str, slots: str) -> None:
    with SpecEngine("tiny", draft=draft, graphs=True, slots=slots, **FIELDS) as engine:
        found = [[own.token_ids for own in engine.generate(PROMPTS, PARAMS)] for _ in range(2)]
        assert found == [wanted] * 2 and engine.stats().failed_steps == 0
