"""States that are kept on a guess change no text, and let the second of two like prompts hit."""

from pathlib import Path

import pytest

from specdec import Completion, SamplingParams, SpecEngine
from specdec.state_slots.prefix import cache as cache_module
from tests.lossless.test_prefixes import DRAFTS, PARAMS, PROMPTS, SETTINGS, alone, folder

__all__ = ["alone", "folder"]
LENGTH = 24


@pytest.mark.parametrize("slots", ["record", "snapshot"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_guesses_change_no_text(
    folder: Path, alone: list[Completion], draft: str, slots: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "GUESS_TOKENS", LENGTH)
    with SpecEngine(folder, prefix_cache=True, slots=slots, **DRAFTS[draft], **SETTINGS) as engine:
        turns = [engine.generate([p], [own])[0] for p, own in zip(PROMPTS, PARAMS, strict=True)]
        together = engine.generate(PROMPTS, PARAMS)
        assert engine.stats().failed_steps == 0
    for found in (turns, together):
        assert [own.token_ids for own in found] == [own.token_ids for own in alone]


def test_the_second_prompt_hits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "GUESS_TOKENS", LENGTH)
    own = SamplingParams(max_tokens=4, ignore_eos=True)
    with SpecEngine(folder, prefix_cache=True, draft="mtp", **SETTINGS) as engine:
        same = [engine.generate([PROMPTS[0]], own)[0].stats.cached_tokens for _ in range(2)]
        engine.flush()
        stem = PROMPTS[0]
        ends = [engine.generate([[*stem, i, 1, 2]], own)[0].stats.cached_tokens for i in range(5)]
    assert len(stem) == 100 and same == [0, 96]
    assert ends == [0, 96, 100, 100, 100]
