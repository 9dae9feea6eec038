"""Texts with a prefix cache equal those without, for every drafter and eviction."""

import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from specdec import Completion, SamplingParams, SpecdecError, SpecEngine
from specdec.core.batch import StepReport
from specdec.errors import ConfigError, RequestError
from specdec.models.frame import LoadedHalfLayer
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.lease import PrefixHit, PrefixLease
from specdec.state_slots.prefix.rates import TierRates
from tests.conftest import HYBRID
from tests.selection import EXHAUSTIVE, only

VOCAB: int = HYBRID["vocab_size"]
TREE = {"adaptive": False, "num_steps": 3, "topk": 2, "num_draft_tokens": 6}
SETTINGS = {"dtype": "float64", "max_model_len": 256, "chunk_tokens": 32, "max_running": 4}
DRAFTS: dict[str, Mapping[str, Any]] = {
    "none": {"draft": "none"},
    "mtp": {"draft": "mtp", **TREE},
    "suffix": {"draft": "suffix", **TREE},
    "self-int4": {"draft": "self-int4", "adaptive": False, "num_steps": 3},
    "auto": {"draft": "auto"},
}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(mtp_num_hidden_layers=1)


def family(seed: int, count: int) -> list[list[int]]:
    """Make prompts that diverge anywhere, some of them twice."""
    draw = random.Random(seed)
    prompts: list[list[int]] = [[draw.randrange(VOCAB) for _ in range(100)]]
    while len(prompts) < count:
        stem = draw.choice(prompts)
        cut = draw.randrange(1, len(stem) + 1)
        prompts.append([*stem[:cut], *(draw.randrange(VOCAB) for _ in range(draw.randrange(40)))][:200])
    return prompts


PROMPTS = family(1, 28)
PARAMS = [
    SamplingParams(max_tokens=12 + i % 9, temperature=0.8 * (i % 2), seed=i, stop_token_ids=[i % VOCAB])
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[list[Completion]]:
    with SpecEngine(folder, draft="none", prefix_cache=False, **SETTINGS) as engine:
        yield engine.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("slots", only({"record"}, ["record", "snapshot"]))
@pytest.mark.parametrize("draft", only({"none", "mtp", "auto"}, DRAFTS))
def test_texts_are_those_without_a_cache(
    folder: Path, alone: list[Completion], draft: str, slots: str
) -> None:
    with SpecEngine(folder, prefix_cache=True, slots=slots, **DRAFTS[draft], **SETTINGS) as engine:
        turns = [engine.generate([p], [own])[0] for p, own in zip(PROMPTS, PARAMS, strict=True)]
        together = engine.generate(PROMPTS, PARAMS)
        cache = engine.model.loop.scheduler.cache
        assert cache and cache.counts.states_evicted and engine.stats().failed_steps == 0
    for found in (turns, together):
        assert [own.token_ids for own in found] == [own.token_ids for own in alone]
        assert sum(own.stats.cached_tokens for own in found) > 300


def test_the_state_of_another_prefix_is_detected(
    folder: Path, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: the cache returns an ancestor's state."""
    right = PrefixCache.lend

    def wrong(cache: PrefixCache, owner: Hashable, lease: PrefixLease, state: int | None) -> PrefixHit:
        own, above = lease.found.state, lease.found.parent
        while above and above.state is None:
            above = above.parent
        if above:
            lease.found.state = above.state
        hit = right(cache, owner, lease, state)
        lease.found.state = own
        return hit

    monkeypatch.setattr(PrefixCache, "lend", wrong)
    with SpecEngine(folder, draft="none", prefix_cache=True, **SETTINGS) as engine:
        found = [engine.generate([p], [own])[0] for p, own in zip(PROMPTS, PARAMS, strict=True)]
    assert [own.token_ids for own in found] != [own.token_ids for own in alone]


# Every position in a block and in a chunk, twice; then every position in a later block.
LENGTHS = (*range(1, 66), *range(66, 210, 9))
FOUR = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def continued(folder: Path) -> list[tuple[list[int], int, Completion]]:
    """Return prompts of each length, a further token, and a plain engine's output for both."""
    draw = random.Random(5)
    with SpecEngine(folder, draft="none", prefix_cache=False, **SETTINGS) as plain:
        stems = [[draw.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
        ends = [draw.randrange(VOCAB) for _ in LENGTHS]
        asked = [[*stem, end] for stem, end in zip(stems, ends, strict=True)]
        return [*zip(stems, ends, [plain.generate([own], FOUR)[0] for own in asked], strict=True)]


@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_a_prompt_is_a_cache_hit_at_any_length(
    folder: Path, continued: list[tuple[list[int], int, Completion]], draft: str
) -> None:
    with SpecEngine(folder, prefix_cache=True, **DRAFTS[draft], **SETTINGS) as engine:
        for stem, end, expected in continued:
            engine.generate([stem], SamplingParams(max_tokens=1, temperature=0.0))
            for last in ((end + 1) % VOCAB, end):
                found = engine.generate([[*stem, last]], FOUR)[0]
                assert found.stats.cached_tokens == len(stem)
            assert found.token_ids == expected.token_ids


@EXHAUSTIVE
@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_evicted_prefixes_return_from_the_host(
    folder: Path, alone: list[Completion], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierRates, "pays", lambda *_: True)
    small = {**SETTINGS, **DRAFTS[draft], "max_running": 2}
    with SpecEngine(folder, prefix_cache=True, host_cache_bytes="64MiB", **small) as engine:
        found = [engine.generate([p], [own])[0] for p, own in zip(PROMPTS, PARAMS, strict=True)]
        again = [engine.generate([p], [own])[0] for p, own in zip(PROMPTS, PARAMS, strict=True)]
        stats = engine.stats()
        assert stats.failed_steps == 0 and stats.prefixes and stats.prefixes.fetched > 500
        engine.flush()
        stats = engine.stats()
        assert stats.prefixes and not stats.prefixes.cached_bytes
        assert not stats.arena.block_bytes and not stats.arena.state_bytes
    for texts in (found, again):
        assert [text.token_ids for text in texts] == [own.token_ids for own in alone]
    assert sum(own.stats.cached_tokens for own in again) > sum(map(len, PROMPTS)) / 2


def test_salts_share_nothing(folder: Path) -> None:
    stem = PROMPTS[0]
    with SpecEngine(folder, draft="none", prefix_cache=True, **SETTINGS) as engine:

        def cached(prompt: list[int], salt: str | None) -> int:
            params = SamplingParams(max_tokens=1, cache_salt=salt)
            return engine.generate([prompt], params)[0].stats.cached_tokens

        salts = (None, "a", "b")
        assert [cached(stem, salt) for salt in salts] == [0, 0, 0]
        assert [cached([*stem, 1], salt) for salt in salts] == [len(stem)] * 3


def test_a_mark_keeps_a_state_the_first_time(folder: Path) -> None:
    stem, draw = PROMPTS[0][:70], random.Random(3)
    ends = [[*stem, *(draw.randrange(VOCAB) for _ in range(9))] for _ in range(3)]
    for marks, wanted in ((None, [0, 64, 70]), ([70], [0, 70, 70]), ([33], [0, 65, 70])):
        with SpecEngine(folder, draft="none", prefix_cache=True, **SETTINGS) as engine:
            params = SamplingParams(max_tokens=1, cache_marks=marks)
            assert [engine.generate([end], params)[0].stats.cached_tokens for end in ends] == wanted


def test_a_mark_beyond_the_prompt_and_an_empty_salt_are_named(folder: Path) -> None:
    with (
        SpecEngine(folder, draft="none", prefix_cache=True, **SETTINGS) as engine,
        pytest.raises(RequestError, match="cache_marks: 4 exceeds the prompt's 3 tokens"),
    ):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, cache_marks=[3, 4]))
    with pytest.raises(ConfigError, match="cache_salt"):
        SamplingParams(cache_salt="")


def test_a_fully_marked_prompt_is_cached_for_its_continuations(folder: Path) -> None:
    stem = PROMPTS[0]
    with SpecEngine(folder, draft="mtp", prefix_cache=True, **TREE, **SETTINGS) as engine:
        engine.generate([stem], SamplingParams(max_tokens=9, ignore_eos=True, cache_marks=[len(stem)]))
        done = engine.generate([[*stem, 5, 6]], SamplingParams(max_tokens=3, temperature=0.0))
    assert done[0].stats.cached_tokens == len(stem)


@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_nan_is_not_cached_for_later_requests(
    folder: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem, right = PROMPTS[0], LoadedHalfLayer.run
    own = {**DRAFTS[draft], **SETTINGS}
    params = SamplingParams(max_tokens=4, temperature=0.0)
    asked = [[*stem, token] for token in range(4)]
    with SpecEngine(folder, prefix_cache=False, **own) as engine:
        wanted = [engine.generate([prompt], params)[0].token_ids for prompt in asked]
    with SpecEngine(folder, prefix_cache=True, **own) as engine:

        def wrong(*args: Any, **named: Any) -> Any:
            return right(*args, **named) * float("nan")

        engine.generate([stem[:40]], SamplingParams(max_tokens=1))
        monkeypatch.setattr(LoadedHalfLayer, "run", wrong)
        with pytest.raises(SpecdecError, match="not numbers"):
            engine.generate([[*stem, 9], [*stem, 8], [*stem[:90], 7], stem[:20]], params)
        monkeypatch.setattr(LoadedHalfLayer, "run", right)
        found = [engine.generate([prompt], params)[0].token_ids for prompt in asked]
        assert found == wanted and engine.stats().failed_steps == 0


def test_outputs_of_one_salt_are_drafts_for_it_alone(folder: Path) -> None:
    own = {"draft": "suffix", "adaptive": False, "num_steps": 4, "topk": 1, **SETTINGS}
    with SpecEngine(folder, prefix_cache=True, **own) as engine:

        def accepted(salt: str | None) -> int:
            params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, cache_salt=salt)
            return engine.generate([PROMPTS[0][:30]], params)[0].stats.accepted

        first = accepted("a")
        assert [accepted(salt) for salt in ("b", None)] == [first] * 2
        assert min(accepted(salt) for salt in ("a", "b", None)) > first


@pytest.mark.parametrize("why", ["cancelled", "preempted"])
def test_a_cancelled_prefill_releases_only_its_own_memory(folder: Path, why: str) -> None:
    """It diverges from the others where no state is cached, so that their common node is split for it."""
    draw, params = random.Random(8), SamplingParams(max_tokens=2, temperature=0.0)
    shared = [draw.randrange(VOCAB) for _ in range(90)]
    with SpecEngine(folder, draft="none", **SETTINGS) as engine:
        loop, chats = engine.model.loop, [[*shared, number] for number in range(3)]
        for chat in chats:
            chat += [*engine.generate([chat], params)[0].token_ids, 1]
        right, left = loop.step, list[bool]()

        def step() -> None:
            right()
            for request in loop.scheduler.running:
                if not left and request.tokens[60] == VOCAB - 1 and 60 < request.num_computed_tokens < 140:
                    left.append(True)
                    if why == "cancelled":
                        request.cancelled = True
                    else:
                        loop.scheduler.preempt(request)

        loop.step = step  # type: ignore[method-assign]
        engine.generate([[*shared[:60], *[VOCAB - 1] * 80]], params)
        assert left
        hits = [engine.generate([chat], params)[0].stats.cached_tokens for chat in chats]
        loop.check_idle()
    assert hits == [len(chat) - 2 for chat in chats]


@pytest.mark.parametrize(
    ("draft", "slots", "graphs"),
    [
        ("none", "record", False),
        ("mtp", "record", True),
        ("mtp", "snapshot", False),
        ("suffix", "record", True),
    ],
)
def test_a_stopped_answer_need_not_be_read_again(
    folder: Path, alone: list[Completion], draft: str, slots: str, graphs: bool
) -> None:
    """The client disconnects after some tokens while others continue; the next turn reuses all of them."""
    params, stops = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True), (1, 2, 6, 15)
    own = {**SETTINGS, **DRAFTS[draft], "slots": slots, "graphs": graphs}
    with (
        SpecEngine(folder, prefix_cache=True, **own) as engine,
        SpecEngine(folder, draft="none", prefix_cache=False, **SETTINGS) as plain,
    ):
        left: dict[int, list[int]] = {}

        def leave(report: StepReport) -> None:
            for request in (row.request for row in report.result.rows):
                which = next(i for i in range(4) if request.tokens[:90] == prompts[i][:90])
                if turn == 0 and len(request.tokens) - request.prompt_length >= stops[which]:
                    request.cancelled = True
                    left[which] = request.tokens[: request.num_computed_tokens]

        engine.model.loop.observers.append(leave)
        prompts = [[i, *PROMPTS[0][:89]] for i in range(4)]
        for turn in range(2):
            if turn:
                prompts = [[*left[i], 5, i] for i in range(4)]
            found = engine.generate(prompts, params)
        engine.model.loop.check_idle()
        stats = engine.stats()
        assert stats.failed_steps == 0 and bool(stats.device_steps) == graphs
        assert [f.token_ids for f in found] == [f.token_ids for f in plain.generate(prompts, params)]
        assert [f.stats.cached_tokens for f in found] == [len(prompt) - 2 for prompt in prompts]


def test_divergence_is_learnt_from_prefixes_of_the_host_tier(folder: Path) -> None:
    """Prompts in a cycle, larger than the device's cache."""
    draw, params = random.Random(4), SamplingParams(max_tokens=2, temperature=0.0)
    stems = [[draw.randrange(VOCAB) for _ in range(100)] for _ in range(6)]
    small = {**SETTINGS, "max_running": 1, "memory_bytes": 300_000, "host_cache_bytes": "8MiB"}
    with SpecEngine(folder, draft="none", **small) as engine:
        hits = [
            [engine.generate([[*stem, turn]], params)[0].stats.cached_tokens for stem in stems]
            for turn in range(4)
        ]
        assert engine.stats().prefixes.fetched  # type: ignore[union-attr]
    assert hits[:2] == [[0] * 6] * 2 and hits[2:] == [[100] * 6] * 2
