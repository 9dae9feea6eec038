"""Drafts ranked with or without the target's noise: the text is equal; with noise more is accepted."""

from pathlib import Path
from typing import Any

import pytest

from specdec import Completion, SamplingParams, SpecEngine
from tests.lossless.cases import SHAPES
from tests.models.agreeing import END

COUNT = 6


def ask(folder: Path, temperature: float, **fields: Any) -> list[Completion]:
    prompts = [[(7 * i + 3 * j) % END for j in range(3)] for i in range(COUNT)]
    params = [
        SamplingParams(max_tokens=40, temperature=temperature, seed=i, ignore_eos=True) for i in range(COUNT)
    ]
    with SpecEngine(folder, dtype="float64", **fields) as engine:
        return engine.generate(prompts, params)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_noise_changes_acceptance_but_no_text(folder: Path, shape: str, graphs: bool) -> None:
    fields: dict[str, Any] = {"draft": "mtp", "adaptive": False, "graphs": graphs, **SHAPES[shape]}
    plain = ask(folder, 1.0, draft="none")
    shared, without = (ask(folder, 1.0, **fields, draft_noise=noise) for noise in (True, False))
    texts = [[own.token_ids for own in done] for done in (plain, shared, without)]
    assert texts[0] == texts[1] == texts[2]
    accepted = [sum(own.stats.accepted for own in done) for done in (shared, without)]
    assert accepted[0] > 1.2 * accepted[1] > 0


@pytest.mark.parametrize("graphs", [False, True])
def test_without_a_temperature_there_is_no_noise(folder: Path, graphs: bool) -> None:
    fields: dict[str, Any] = {"draft": "mtp", "adaptive": False, "graphs": graphs, **SHAPES["tree"]}
    shared, without = (ask(folder, 0.0, **fields, draft_noise=noise) for noise in (True, False))
    assert [own.origins for own in shared] == [own.origins for own in without]
