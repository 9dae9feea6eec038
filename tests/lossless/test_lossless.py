"""With one seed the text is the same whoever drafts, in whatever shape, backing, batch and memory.

The cells of the capability table are visited one by one, in float64, where rounding decides nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specdec import Completion, SamplingParams, SpecEngine
from specdec.setup.capabilities import AXES, Cell, cells, refusal
from tests.lossless.cases import (
    FEW,
    LOGPROBS,
    SHAPES,
    Case,
    differences,
    drafting_engine,
    generate,
    in_brief,
    memory_for,
    plain_cases,
    preempt_each,
)
from tests.models.random_checkpoints import FAMILIES
from tests.tolerances import FLOAT64_LOGITS

Cases = Callable[[str], tuple[Path, list[Case], list[Case]]]
Group = tuple[str, str, str, str, str]
BATCHES = AXES["batch"]


@pytest.fixture(scope="module")
def plain(family_folder: Callable[..., Path]) -> Cases:
    """Return a family's checkpoint and what plain decoding says to every request, at length and in brief."""
    made: dict[str, tuple[Path, list[Case], list[Case]]] = {}

    def make(family: str) -> tuple[Path, list[Case], list[Case]]:
        if family not in made:
            folder = family_folder(family)
            cases = plain_cases(folder)
            made[family] = folder, cases, in_brief(folder, cases)
        return made[family]

    return make


def groups() -> Mapping[Group, list[Cell]]:
    """Put the cells together that one engine's settings serve; the oracle drafts wherever ngram does."""
    found: dict[Group, list[Cell]] = {}
    for cell in cells():
        if not refusal(cell) and cell.family in FAMILIES:
            key = cell.family, cell.drafter, cell.shape, cell.backing, cell.steps
            found.setdefault(key, []).append(cell)
    oracles = {
        (family, "oracle", *rest): [replace(cell, drafter="oracle") for cell in own]
        for (family, drafter, *rest), own in found.items()
        if drafter == "ngram"
    }
    return found | oracles


GROUPS = groups()


def hits(engine: SpecEngine, cases: Sequence[Case]) -> list[list[Completion]]:
    """Ask for each alone, after its prompt has come by again: a state is kept where it was known to end."""
    for case in cases:
        engine.generate([case.prompt], SamplingParams(max_tokens=1))
    done = [own for case in cases for own in generate(engine, [case])]
    assert sum(own[0].stats.cached_tokens for own in done) > 20
    return done


@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_every_supported_cell_says_what_plain_decoding_says(plain: Cases, group: Group) -> None:
    family, drafter, shape, backing, steps = group
    folder, cases, brief = plain(family)
    by_length = sorted(cases, key=lambda case: len(case.said[0].token_ids))
    longest = list({case.feature: case for case in by_length}.values())
    # Of each feature one request meets a cache and another reads its prompt beside others, by turns.
    last = [case for case in cases if case not in longest and len(case.said[0].token_ids) > FEW]
    others = list({case.feature: case for case in (*longest, *last)}.values())
    again, once = (longest, others) if list(GROUPS).index(group) % 2 else (others, longest)
    fields = {**SHAPES[shape], "slots": backing, "graphs": steps == "device"}
    found: dict[tuple[str, str], tuple[Sequence[Case], Sequence[Sequence[Completion]]]] = {}
    with drafting_engine(folder, drafter, cases, chunk_tokens=512, **fields) as (engine, _):
        found["alone", "read"] = longest, [own for case in longest for own in generate(engine, [case])]
        layout = engine.model.settings.layout
        ran = engine.model.loop.runner.steps if engine.model.loop.runner else 0
    with drafting_engine(folder, drafter, cases, chunk_tokens=5, **fields) as (engine, seen):
        found["mixed", "read"] = once, generate(engine, once)
        # An n-gram seldom comes by while a prompt is read: the oracle drafts in the same place.
        assert seen.mixed > 0 or drafter in ("none", "ngram")
        # Few of these steps have nobody's prompt to read; a head that is behind then takes some to catch up.
        ran += engine.model.loop.runner.steps if engine.model.loop.runner else 0
        assert ran > 0 or steps == "host"
    # Room for three, and even they must give their memory back once.
    memory = memory_for(layout, sequences=3, blocks=10)
    with drafting_engine(folder, drafter, cases, chunk_tokens=64, memory_bytes=memory, **fields) as (
        engine,
        _,
    ):
        preempt_each(engine)
        found["preempted", "read"] = longest, generate(engine, longest)
    with drafting_engine(folder, drafter, cases, chunk_tokens=5, prefix_cache=True, **fields) as (engine, _):
        preempt_each(engine)
        found["mixed", "kept"] = found["preempted", "kept"] = again, generate(engine, again)
        few = [brief[cases.index(case)] for case in again]
        found["alone", "kept"] = few, hits(engine, few)
    visited = set()
    for (batch, prefixes), (asked, own) in found.items():
        assert differences(asked, own, within=LOGPROBS if family != "nemotron_h" else FLOAT64_LOGITS) == []
        visited |= {
            Cell(drafter, shape, backing, steps, prefixes, family, case.feature, batch)
            for case, done in zip(asked, own, strict=True)
            if batch != "preempted" or any(c.stats.preemptions for c in done)
        }
    assert visited == set(GROUPS[group])
