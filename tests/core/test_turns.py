"""Multi-turn chats that reuse the last turn's state: no token is prefilled twice, no text changes."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.setup.drafters import DRAFTERS
from tests.lossless.test_prefixes import DRAFTS, SETTINGS, VOCAB, folder
from tests.selection import EXHAUSTIVE, only

__all__ = ["folder"]
TURNS = 4
LARGE = {**SETTINGS, "max_running": 16}
Chat = tuple[list[tuple[int, ...]], list[int]]


def chat(engine: SpecEngine, number: int, **params: Any) -> Chat:
    """Run a chat; return the answers, and the prefilled tokens of each prompt."""
    draw = random.Random(number)
    text: list[int] = []
    answers, read = [], []
    for turn in range(TURNS):
        text += [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 20))]
        own = SamplingParams(max_tokens=20, seed=turn, **params)
        done = engine.generate([text], own)[0]
        answers.append(done.token_ids)
        read.append(len(text) - done.stats.cached_tokens)
        text = [*text, *done.token_ids]
    return answers, read


RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9},
    "stopped": {"stop_token_ids": [*range(0, VOCAB, 9)]},
}


CELLS = [
    pytest.param(draft, graphs, id=f"{draft}-{'device' if graphs else 'host'}")
    for draft in DRAFTS
    for graphs in (False, True)
    if not (graphs and draft in DRAFTERS and DRAFTERS[draft].host_only)
]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[dict[str, Chat]]:
    """Run a chat for each rule without drafts and without a cache."""
    with SpecEngine(folder, draft="none", prefix_cache=False, **LARGE) as engine:
        yield {name: chat(engine, number, **params) for number, (name, params) in enumerate(RULES.items())}


@EXHAUSTIVE
@pytest.mark.parametrize("slots", only({"record"}, ["record", "snapshot"]))
@pytest.mark.parametrize(("draft", "graphs"), CELLS)
def test_a_turn_goes_on_where_the_last_one_ended(
    folder: Path, alone: dict[str, Chat], draft: str, slots: str, graphs: bool
) -> None:
    own = {**LARGE, "graphs": graphs, "slots": slots, **DRAFTS[draft]}
    for number, (name, params) in enumerate(RULES.items()):
        plain, whole = alone[name]
        with SpecEngine(folder, prefix_cache=True, **own) as engine:
            found, read = chat(engine, number, **params)
            assert engine.stats().failed_steps == 0
        assert found == plain
        # The new prompt tokens, and the last token of the previous answer.
        new = [b - a - len(answer) + 1 for a, b, answer in zip(whole, whole[1:], found, strict=False)]
        near = sum(count <= most for count, most in zip(read[1:], new, strict=True))
        # A stop within the accepted path may leave a state beyond it.
        assert near == TURNS - 1 or (name == "stopped" and near and draft != "none")
