"""Drafts that agree in part, are deep, end inside a path, lack memory, or are cancelled: all lossless."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from specdec import Completion, SamplingParams, SpecEngine
from specdec.config.drafters import only_chains
from specdec.draft.costs import Costs
from specdec.kernels.native.compiled import compiled
from specdec.verify.sampler import SamplingNode, TokenSampler, perturb
from tests.lossless.cases import (
    LONGEST,
    SHAPES,
    Case,
    differences,
    drafting_engine,
    generate,
    memory_for,
)
from tests.models.agreeing import END, VOCAB
from tests.models.random_checkpoints import HEADS
from tests.models.representatives import EVERY_CELL, REPRESENTATIVES
from tests.models.runner import Runner
from tests.selection import EXHAUSTIVE, only
from tests.tolerances import FLOAT32_GAP

BACKINGS = ("record", "snapshot")
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(family_folder: Folder) -> Folder:
    return family_folder


def ask(engine: SpecEngine, count: int, **changes: object) -> list[Case]:
    """Return plain decoding outputs for prompts of several lengths."""
    cases = []
    for i in range(count):
        params = SamplingParams(
            **{
                "max_tokens": 40,
                "temperature": [0.0, 0.7, 1.3][i % 3],
                "seed": i,
                "ignore_eos": True,
                **changes,
            }  # type: ignore[arg-type]
        )
        prompt = [(7 * i + 3 * j) % END for j in range(1 + i % 5)]
        cases.append(Case("", prompt, params, engine.generate([prompt], params)))
    return cases


def plain(folder: Path, count: int, **changes: object) -> list[Case]:
    with SpecEngine(
        folder, dtype="float64", draft="none", prefix_cache=False, max_model_len=LONGEST
    ) as engine:
        return ask(engine, count, **changes)


plain_once = cache(plain)


@pytest.mark.parametrize("family", HEADS)
def test_heads_agree_in_part(folder: Folder, family: str) -> None:
    """Validates these tests: a head's chains and trees are rejected, partly accepted and fully accepted."""
    cases = plain(folder(family), 24, temperature=0.0, max_tokens=16)
    for shape, fields in SHAPES.items():
        with drafting_engine(folder(family), "mtp", cases, **fields) as (engine, seen):
            assert differences(cases, generate(engine, cases)) == []
            per_depth = engine.model.loop.counts.per_depth
        print(family, shape, dict(seen.outcomes), [round(rate, 2) for rate in per_depth])
        assert min(seen.outcomes[kind] for kind in ("none", "part", "all")) > 0
        if shape == "chain":
            assert all(0.25 <= rate <= 0.85 for rate in per_depth) and len(per_depth) == 4
        else:
            assert seen.winding > 0


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("family", only(EVERY_CELL, REPRESENTATIVES))
def test_deep_trees_and_full_acceptance(folder: Folder, family: str, backing: str) -> None:
    cases = plain_once(folder(family), 6)
    outcomes = Counter[str]()
    for rate, fields in (
        (1.0, {"num_steps": 15, "topk": 1, "num_draft_tokens": 16}),
        (0.93, {"num_steps": 13, "topk": 4, "num_draft_tokens": 64}),
        (0.5, {"num_steps": 5, "topk": 8, "num_draft_tokens": 30}),
    ):
        with drafting_engine(folder(family), "oracle", cases, rate=rate, slots=backing, **fields) as (
            engine,
            seen,
        ):
            assert differences(cases, generate(engine, cases)) == []
            outcomes += seen.outcomes
            if rate == 1.0:
                assert set(seen.outcomes) == {"all"}
            else:
                assert seen.winding > 0
    assert min(outcomes[kind] for kind in ("none", "part", "all")) > 0


@pytest.mark.parametrize("drafter", ["mtp", "suffix", "self-int4", "auto"])
@pytest.mark.parametrize("family", EVERY_CELL)
def test_a_shape_chosen_by_the_clock_changes_nothing(
    folder: Folder, family: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts depend on step times in this mode; outputs must not. Here times are random."""
    rng, observe = random.Random(5), Costs.observe
    monkeypatch.setattr(
        *(Costs, "observe"),
        lambda own, rows, width, _, groups=1: observe(own, rows, width, rng.uniform(0.5, 1.5), groups),
    )
    cases = plain_once(folder(family), 8)
    tree = {} if only_chains(drafter) else {"topk": 2, "num_draft_tokens": 6}
    fields = {"num_steps": 3, "adaptive": True, **tree}
    with drafting_engine(folder(family), drafter, cases, **fields) as (engine, _):
        assert differences(cases, generate(engine, cases)) == []
        assert engine.model.loop.counts.drafted > 0


@EXHAUSTIVE
@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("family", only({"qwen3_5"}, ["qwen3", "qwen3_5", "nemotron_h"]))
def test_drafts_are_shrunk_before_requests_wait(folder: Folder, family: str, backing: str) -> None:
    """Long outputs in little memory: drafts shrink, their slots are reclaimed, and rows are preempted."""
    cases = plain(folder(family), 8, max_tokens=55)
    with drafting_engine(folder(family), "oracle", cases, slots=backing, **SHAPES["tree"]) as (engine, _):
        layout = engine.model.settings.layout
    limits = Counter[str]()
    for blocks in (7, 9, 11, 14):
        memory = memory_for(layout, sequences=4, blocks=blocks)
        with drafting_engine(
            folder(family), "oracle", cases, memory_bytes=memory, slots=backing, **SHAPES["tree"]
        ) as (engine, _):
            assert differences(cases, generate(engine, cases)) == []
            scheduler = engine.model.loop.scheduler
            limits += scheduler.limited_by
            limits["preempted"] += scheduler.preemptions
    assert limits["preempted"] > 0
    assert limits["draft slots" if layout.states else "draft blocks"] > 0


ENDS: Mapping[str, Callable[[Completion], Mapping[str, object]]] = {
    "stop string": lambda own: {"stop": own.text[9:11]},
    "stop token": lambda own: {"stop_token_ids": [own.token_ids[9]]},
    "end of text": lambda own: {"ignore_eos": False},
    "max_tokens": lambda own: {"max_tokens": 9},
    "max_model_len": lambda own: {},
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_text_ends_inside_an_accepted_path(folder: Folder, shape: str, end: str) -> None:
    """The oracle continues texts beyond their end: nothing after the end may be emitted."""
    longest = 19 if end == "max_model_len" else LONGEST
    full = plain(folder("qwen3_5"), 9, logit_bias={END: 3.0})
    with SpecEngine(
        folder("qwen3_5"), dtype="float64", draft="none", prefix_cache=False, max_model_len=longest
    ) as engine:
        cases = []
        for case in full:
            params = case.params.model_copy(update=ENDS[end](case.said[0]))
            cases.append(Case("", case.prompt, params, engine.generate([case.prompt], params)))
    fields = {**SHAPES[shape], "num_steps": 6, "num_draft_tokens": 7 if shape == "chain" else 24}
    with drafting_engine(folder("qwen3_5"), "oracle", full, rate=1.0, max_model_len=longest, **fields) as (
        engine,
        seen,
    ):
        assert differences(cases, generate(engine, cases)) == []
    reasons = Counter(case.said[0].finish_reason for case in cases)
    assert reasons["length" if end.startswith("max") else "stop"] >= 3
    # Drafts never exceed the length limit; an earlier stop is known only to the target.
    assert (seen.overshot > 0) == (not end.startswith("max"))


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("drafter", ["mtp", "self-int4", "oracle"])
def test_cancelling_in_mid_draft_returns_all_memory(folder: Folder, drafter: str, backing: str) -> None:
    cases = plain_once(folder("qwen3_5"), 6)
    shape = SHAPES["chain" if only_chains(drafter) else "tree"]
    with drafting_engine(folder("qwen3_5"), drafter, cases, slots=backing, **shape) as (engine, _):

        async def leave_after(case: Case, tokens: int) -> None:
            said: list[int] = []
            stream = engine.stream(case.prompt, case.params)
            async for delta in stream:
                said += delta.token_ids
                if len(said) > tokens:
                    break
            await stream.aclose()

        async def run() -> None:
            await asyncio.gather(*(leave_after(case, 3 * i) for i, case in enumerate(cases)))

        asyncio.run(run())
        # `drafting_engine` checks on exit that every slab is free.
        assert differences(cases[:1], generate(engine, cases[:1])) == []
        assert not len(engine.model.loop.speculation.acceptance)


@EXHAUSTIVE
@pytest.mark.skipif(not compiled(), reason="needs a C compiler")
@pytest.mark.parametrize("family", only(EVERY_CELL, REPRESENTATIVES))
def test_float32_in_the_kernels_that_users_get(folder: Folder, family: str) -> None:
    """Narrow and wide windows round differently: a text may diverge where two tokens nearly tie."""
    exact = plain(folder(family), 12)
    total = excused = 0
    for drafter in ("mtp", "oracle") if family in HEADS else ("oracle",):
        for backing in BACKINGS:
            fields = {"dtype": "float32", "slots": backing, **SHAPES["tree"]}
            with SpecEngine(
                folder(family), dtype="float32", draft="none", prefix_cache=False, max_model_len=LONGEST
            ) as engine:
                cases = [Case("", c.prompt, c.params, engine.generate([c.prompt], c.params)) for c in exact]
            with drafting_engine(folder(family), drafter, cases, **fields) as (engine, _):
                assert engine.model.settings.kernels == "native"
                for case, own in zip(cases, generate(engine, cases), strict=True):
                    total += 1
                    if case.said[0].token_ids != own[0].token_ids:
                        excused += 1
                        assert gap_where_they_part(folder(family), case, own[0]) < FLOAT32_GAP
    print(f"{family}: {excused} of {total} texts part where two tokens lie within {FLOAT32_GAP}")


def gap_where_they_part(folder: Path, case: Case, other: Completion) -> float:
    """Return the gap between the two best tokens' perturbed logits where a text first differs."""
    said = case.said[0].token_ids
    at = next(i for i, (a, b) in enumerate(zip(said, other.token_ids, strict=True)) if a != b)
    runner = Runner(folder, torch.float64)
    tokens = [*case.prompt, *said[:at]]
    logits_V = runner.read(tokens, len(tokens))[-1]
    chooser = TokenSampler(case.params, seed=case.params.seed or 0, prompt=case.prompt, vocab=VOCAB)
    for token in said[:at]:
        chooser.observe(token)
    scores_1V = perturb(logits_V[None], [SamplingNode(chooser, len(tokens))], runner.network.kernels)
    first, second = scores_1V[0].topk(2).values.tolist()
    return float(first - second)
