"""A request may disable drafts beside others that have them, and may request its draft trees."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec import Completion, Delta, SamplingParams, SpecEngine
from specdec.core.batch import ScheduledRequest
from specdec.core.device.runner import Runner
from specdec.core.outputs import DraftTree
from specdec.verify.walk import AcceptedPath
from tests.lossless.cases import SHAPES, drafting_engine, plain_cases
from tests.models.agreeing import END

MODES: dict[str, dict[str, Any]] = {
    "none": {"draft": "none"},
    "chain": {"draft": "mtp", **SHAPES["chain"]},
    "tree": {"draft": "mtp", **SHAPES["tree"]},
    "suffix": {"draft": "suffix", **SHAPES["tree"]},
    "device none": {"draft": "none", "graphs": True},
    "device tree": {"draft": "mtp", "graphs": True, **SHAPES["tree"]},
    "device suffix": {"draft": "suffix", "graphs": True, **SHAPES["tree"]},
}
DRAFTING = [mode for mode in MODES if "none" not in mode]
PROMPTS = [[(7 * i + 3 * j) % END for j in range(1 + i % 5)] for i in range(6)]


def open_engine(folder: Path, mode: str) -> SpecEngine:
    fields = MODES[mode] | ({} if "none" in mode else {"adaptive": False})
    return SpecEngine(folder, dtype="float64", **fields)


def each(count: int, **changes: Any) -> list[SamplingParams]:
    """Make parameters that differ by request; a sequence among the changes has one value for each."""
    return [
        SamplingParams(
            max_tokens=14 + i,
            ignore_eos=True,
            seed=i,
            **{k: v[i] if isinstance(v, Sequence) else v for k, v in changes.items()},
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", DRAFTING)
def test_who_wants_no_drafts_gets_none_and_the_same_text(folder: Path, mode: str, temperature: float) -> None:
    turns = [i % 2 == 0 for i in range(len(PROMPTS))]
    with open_engine(folder, mode) as engine:
        drafted = engine.generate(PROMPTS, each(len(PROMPTS), temperature=temperature))
        mixed = engine.generate(PROMPTS, each(len(PROMPTS), temperature=temperature, speculate=turns))
        alone = engine.generate(PROMPTS, each(len(PROMPTS), temperature=temperature, speculate=False))
    texts = [[own.token_ids for own in done] for done in (drafted, mixed, alone)]
    assert texts[0] == texts[1] == texts[2]
    plain = [*alone, *(own for own, speculates in zip(mixed, turns, strict=True) if not speculates)]
    for own in plain:
        assert own.stats.drafted == own.stats.accepted == 0 and set(own.origins) == {0}
        assert own.stats.steps == len(own.token_ids) - 1
    neighbours = [own.stats for own, speculates in zip(mixed, turns, strict=True) if speculates]
    assert sum(neighbour.drafted for neighbour in neighbours) > 0
    assert mode == "suffix" or sum(neighbour.accepted for neighbour in neighbours) > 0


@pytest.mark.parametrize("mode", ["device none", "device tree", "device suffix"])
def test_the_device_decides_steps_without_drafts_too(folder: Path, mode: str) -> None:
    with open_engine(folder, mode) as engine:
        runner = engine.model.loop.runner
        assert isinstance(runner, Runner)
        engine.generate(PROMPTS, each(len(PROMPTS), temperature=0.0, speculate=False))
        assert runner.steps > 10


def told(folder: Path, mode: str, **changes: Any) -> list[Completion]:
    """Return the outputs of requests for draft trees, checking that the text is unchanged."""
    with open_engine(folder, mode) as engine:
        done = engine.generate(PROMPTS, each(len(PROMPTS), trees=True, **changes))
        others = engine.generate(PROMPTS, each(len(PROMPTS), **changes))
    assert [own.token_ids for own in done] == [own.token_ids for own in others]
    assert not any(own.drafts for own in others)
    return done


def spelled(tree: DraftTree) -> list[tuple[int, int]]:
    """Return a step's emitted tokens and their origins."""
    path = [(tree.tokens[node], depth) for depth, node in enumerate(tree.accepted, start=1)]
    return path if tree.bonus is None else [*path, (tree.bonus, 0)]


def disagreements(whole: Completion) -> list[str]:
    """List the differences between trees, tokens and statistics."""
    wrong, stats = [], whole.stats
    said = [pair for tree in whole.drafts for pair in spelled(tree)]
    # The first token is from prefill, which verifies nothing.
    if said != list(zip(whole.token_ids, whole.origins, strict=True))[1:]:
        wrong.append(f"the trees spell {said}")
    roots = [whole.token_ids[0]]
    for tree in whole.drafts[:-1]:
        roots.append(spelled(tree)[-1][0])
    if [tree.tokens[0] for tree in whole.drafts] != roots:
        wrong.append("a root is not the token chosen last")
    for tree in whole.drafts:
        above = (0, *tree.accepted)
        if [tree.parents[node] for node in tree.accepted] != list(above[: len(tree.accepted)]):
            wrong.append(f"{tree.accepted} is no path")
        if tree.bonus in [tree.tokens[i] for i, parent in enumerate(tree.parents) if parent == above[-1]]:
            wrong.append("what was drafted is called the target's own")
    if len(whole.drafts) != stats.steps:
        wrong.append(f"{len(whole.drafts)} trees of {stats.steps} steps")
    if sum(len(tree.tokens) - 1 for tree in whole.drafts) != stats.drafted:
        wrong.append(f"the trees hold not the {stats.drafted} nodes that were drafted")
    return wrong


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", [mode for mode in MODES if "suffix" not in mode])
def test_trees_spell_the_tokens(folder: Path, mode: str, temperature: float) -> None:
    found = told(folder, mode, temperature=temperature)
    assert [wrong for whole in found for wrong in disagreements(whole)] == []
    widest = max(len(tree.tokens) for whole in found for tree in whole.drafts)
    winding = any(tree.accepted and tree.accepted[-1] >= 1 + len(tree.accepted)
                  for whole in found for tree in whole.drafts)  # fmt: skip
    assert (widest > 1) == (mode in DRAFTING) and winding == ("tree" in mode)


def test_a_text_that_ends_within_a_path_ends_its_tree(folder: Path) -> None:
    cases = plain_cases(folder)
    with drafting_engine(folder, "oracle", cases, rate=0.95, **SHAPES["tree"]) as (engine, seen):
        for case in cases:
            params = case.params.model_copy(update={"trees": True, "n": 1})
            (own,) = engine.generate([case.prompt], params)
            said = [pair for tree in own.drafts for pair in spelled(tree)]
            assert said == list(zip(own.token_ids, own.origins, strict=True))[1:]
            assert all(tree.bonus is not None for tree in own.drafts[:-1])
    assert seen.overshot > 0


def test_each_delta_has_the_drafts_of_its_steps(folder: Path) -> None:
    async def heard(engine: SpecEngine) -> list[Delta]:
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1, trees=True)
        return [delta async for delta in engine.stream([5, 1], params)]

    with open_engine(folder, "tree") as engine:
        first, *deltas = asyncio.run(heard(engine))
    assert first.drafts == ()  # the token of prefill
    for delta in deltas:
        said = [token for tree in delta.drafts for token, _ in spelled(tree)]
        assert said == list(delta.token_ids) and len(delta.drafts) == 1


def test_a_tree_that_is_cut_wrong_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the root counted as accepted."""

    def cut_wrong(self: ScheduledRequest, path: AcceptedPath, tokens: int) -> DraftTree:
        return DraftTree(self.tree.tokens, self.tree.parents, path.nodes[:tokens], path.emitted[-1])

    monkeypatch.setattr(ScheduledRequest, "draft_tree", cut_wrong)
    assert all(map(disagreements, told(folder, "tree", temperature=0.0)))
