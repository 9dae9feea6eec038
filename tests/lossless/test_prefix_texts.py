"""Texts with a prefix cache equal those without: for drafters, backings, mixers, and little memory.

Prompts diverge anywhere and arrive in many orders; requests are preempted and cancelled, prefixes are evicted
and flushed, and requests for prompt log-probabilities prefill the whole prompt.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specdec import Completion, SamplingParams, SpecEngine
from specdec.setup.capabilities import AXES, RULES
from specdec.setup.drafters import DRAFTERS, NO_HEAD
from tests.lossless.cases import SHAPES, memory_for, preempt_each
from tests.lossless.covering import covering
from tests.models.agreeing import END
from tests.models.representatives import REPRESENTATIVES
from tests.selection import EXHAUSTIVE, only
from tests.tolerances import FLOAT64_LOGITS

FAMILIES = ("qwen3_5", "qwen3")
"""Families tested with each drafter: one with states, one without."""
SETTINGS: Mapping[str, Any] = {"dtype": "float64", "max_model_len": 192, "chunk_tokens": 24, "max_running": 4}
WAYS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 2, "stop": ["a", "7."]},
    {"temperature": 1.2, "seed": 3, "n": 2, "presence_penalty": 0.7},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 2},
    {"temperature": 0.7, "seed": 4, "max_tokens": 1},
)


@dataclass(frozen=True)
class Known:
    """A model, and its outputs for each prompt alone, without a cache."""

    folder: Path
    said: Sequence[Sequence[Completion]]


def grove(seed: int, count: int) -> list[list[int]]:
    """Make prompts that diverge anywhere, some of them twice, some at a block boundary."""
    draw = random.Random(seed)
    prompts: list[list[int]] = [[draw.randrange(END) for _ in range(90)]]
    while len(prompts) < count:
        stem = draw.choice(prompts)
        cut = draw.choice([draw.randrange(1, len(stem) + 1), len(stem) // 16 * 16, len(stem)])
        prompts.append([*stem[:cut], *(draw.randrange(END) for _ in range(draw.randrange(30)))][:140] or [1])
    return prompts


PROMPTS = grove(3, 21)
PARAMS = [SamplingParams(**{"max_tokens": 8 + 2 * (i % 9), **own}) for i, own in enumerate(WAYS * 3)]


@pytest.fixture(scope="module")
def known(family_folder: Callable[..., Path]) -> Callable[[str], Known]:
    made: dict[str, Known] = {}

    def make(family: str) -> Known:
        if family not in made:
            folder = family_folder(family)
            with SpecEngine(folder, draft="none", prefix_cache=False, **SETTINGS) as engine:
                said = [engine.generate([p], [own]) for p, own in zip(PROMPTS, PARAMS, strict=True)]
            made[family] = Known(folder, said)
        return made[family]

    return make


def wrong(engine: SpecEngine, known: Known, order: Sequence[int]) -> list[str]:
    """Complete some prompts together; list the differences from the known outputs."""
    done = iter(engine.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order]))
    found = []
    for i in order:
        for expected in known.said[i]:
            own = next(done)
            same = [getattr(own, name) == getattr(expected, name) for name in ("token_ids", "finish_reason")]
            if not (all(same) and own.text == expected.text and judged_alike(own, expected)):
                found.append(f"prompt {i}: {own.token_ids} for {expected.token_ids}")
    return found


def judged_alike(own: Completion, expected: Completion) -> bool:
    if own.prompt_logprobs is None or expected.prompt_logprobs is None:
        return own.prompt_logprobs is expected.prompt_logprobs
    pairs = itertools.zip_longest(own.prompt_logprobs[1:], expected.prompt_logprobs[1:])
    return all(abs(a.logprob - b.logprob) < FLOAT64_LOGITS for a, b in pairs)


def load(engine: SpecEngine, known: Known) -> list[str]:
    """Run prompts one by one and together, in several orders, beside a cancelled request and a flush."""
    draw, found = random.Random(8), []
    for turn, count in enumerate((5, len(PROMPTS), 7)):
        order = draw.sample(range(len(PROMPTS)), count)
        endless = SamplingParams(max_tokens=90, ignore_eos=True, temperature=1.0, seed=turn)
        ticket = engine.submit([engine.prepare(PROMPTS[turn][:60], endless)], lambda *_: None)
        for some in [order] if turn else [[i] for i in order]:
            found += wrong(engine, known, some)
        ticket.cancel()
        if turn == 1:
            engine.flush()
    return found


ALL = [
    (family, drafter, backing, steps)
    for family, drafter, backing, steps in itertools.product(
        FAMILIES, AXES["drafter"], AXES["backing"], AXES["steps"]
    )
    if ({"drafter": drafter, "family": family}, NO_HEAD) not in RULES
    and not (steps == "device" and drafter in DRAFTERS and DRAFTERS[drafter].host_only)
    and (drafter == "mtp" or (backing, steps) in (("record", "host"), ("snapshot", "device")))
]
OTHERS = [(family, "suffix", "record", "host") for family in REPRESENTATIVES if family not in FAMILIES]
CELLS = ALL + OTHERS
BRIEF = [cell for cell in covering(ALL) if cell[0] == "qwen3_5"]
"""The subset of the default run."""


@EXHAUSTIVE
@pytest.mark.parametrize(("family", "drafter", "backing", "steps"), only(BRIEF, CELLS))
def test_texts_are_those_without_a_cache(
    known: Callable[[str], Known], family: str, drafter: str, backing: str, steps: str
) -> None:
    own = known(family)
    kind = "chain" if drafter == "self-int4" else "tree"
    shape = {"adaptive": False, **SHAPES[kind]} if drafter != "none" else {}
    fields = {"draft": drafter, "slots": backing, "graphs": steps == "device", **shape, **SETTINGS}
    with SpecEngine(own.folder, prefix_cache=False, **fields) as engine:
        layout = engine.model.settings.layout
    # On the device each row uses the records of two windows, or a state per node.
    states = 5 if steps == "host" and backing == "record" else 10 if backing == "snapshot" else 16
    memory = memory_for(layout, sequences=states, blocks=24 if layout.states else 32)
    with SpecEngine(own.folder, prefix_cache=True, memory_bytes=memory, **fields) as engine:
        preempt_each(engine)
        assert load(engine, own) == []
        stats, cache, loop = engine.stats(), engine.model.loop.scheduler.cache, engine.model.loop
        assert stats.failed_steps == 0 and cache
        assert stats.preemptions > 10 and cache.counts.hit > 300
        assert cache.counts.blocks_evicted > 20 or not layout.kv
        assert cache.counts.states_evicted > 10 or not layout.states
        assert (loop.runner is not None) == (steps == "device")  # takes the steps it has memory for
        engine.generate([1], PARAMS[-1])  # the cancelled request is gone before this one ends
        engine.flush()
        usage = loop.arena.usage()
        assert usage.free_slabs == usage.slabs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_is_not_blocked_by_its_own_cached_prefix(
    known: Callable[[str], Known], family: str
) -> None:
    """Memory holds one sequence: a cached prefix without space for a copy is dropped and prefilled again."""
    folder, long = known(family).folder, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with SpecEngine(folder, draft="none", prefix_cache=False, **SETTINGS) as engine:
        layout = engine.model.settings.layout
        chat = engine.generate([PROMPTS[0]], long)[0].token_ids
        texts = [[*PROMPTS[0], *chat, *own][:170] for own in PROMPTS[:3]] + [[*PROMPTS[0][:20], *PROMPTS[5]]]
        said = [engine.generate([text], long)[0].token_ids for text in texts]
    blocks = layout.blocks_for(SETTINGS["max_model_len"])
    memory = memory_for(layout, sequences=int(bool(layout.states)), blocks=blocks)
    with SpecEngine(folder, draft="none", prefix_cache=True, memory_bytes=memory, **SETTINGS) as engine:
        for text, alone in zip(texts, said, strict=True):
            assert engine.generate([PROMPTS[0]], long)[0].token_ids == chat
            assert engine.generate([text], long)[0].token_ids == alone


@pytest.mark.parametrize(("family", "draft"), [("qwen3", "eagle"), ("qwen3_5", "mtp")])
@pytest.mark.parametrize("graphs", [False, True], ids=["host", "device"])
def test_a_head_continues_as_after_a_full_prefill(
    known: Callable[[str], Known], family: str, draft: str, graphs: bool
) -> None:
    """Whatever the arena held before, a cached prefix includes the head's keys of every token."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    fields = {**SETTINGS, "draft": draft, "adaptive": False, "graphs": graphs, **SHAPES["tree"]}
    first = PROMPTS[0][:64]
    texts = [[*first[:cut], *PROMPTS[5][:20]] for cut in (64, 48, 63)]
    texts += [[*texts[0], *PROMPTS[6][:9]], [*texts[0], *PROMPTS[7][:9]], [*first, *PROMPTS[8][:20]]]
    accepted: dict[bool, list[float]] = {}
    for cached in (False, True):
        with SpecEngine(known(family).folder, prefix_cache=cached, **fields) as engine:
            # NaN in every dtype; the dummy slab stays unchanged.
            engine.model.loop.arena.data[engine.model.settings.layout.slab_bytes :].fill_(0xFF)
            engine.generate([first], SamplingParams(max_tokens=1, **greedy))
            done = [engine.generate([text], SamplingParams(max_tokens=30, **greedy))[0] for text in texts]
            accepted[cached] = [own.stats.acceptance_length for own in done]
            assert sum(own.stats.cached_tokens for own in done) > 300 or not cached
    for cold, warm in zip(accepted[False], accepted[True], strict=True):
        assert warm > 0.9 * cold > 1


def test_requests_of_one_step_with_nested_prefixes_keep_their_own_states(
    checkpoint: Callable[..., Path],
) -> None:
    """Without attention a node holds no blocks: any text that continues it extends it."""
    folder = checkpoint(layer_types=["linear_attention"] * 4)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with SpecEngine(folder, draft="none", prefix_cache=False, dtype="float64") as engine:
        said = [5, 6, 7, *engine.generate([[5, 6, 7]], params)[0].token_ids]
        later = [*said[:9], 8, 9]
        expected = engine.generate([later], params)[0].token_ids
    with SpecEngine(folder, draft="none", dtype="float64") as engine:
        brief = params.model_copy(update={"max_tokens": 5})
        ended: list[int] = []
        engine.model.loop.observers.append(lambda report: ended.append(len(report.finished)))
        short, long = engine.generate([said[:3], said[:5]], brief)
        assert [*short.token_ids, *long.token_ids] == [*said[3:8], *said[5:10]] and max(ended) == 2
        (done,) = engine.generate([later], params)
        assert done.stats.cached_tokens == 9 and done.token_ids == expected
