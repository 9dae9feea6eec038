"""SpecEngine through its public interface."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec import EngineConfig, SamplingParams, SpecEngine
from specdec.core.scheduler import StepPlan
from specdec.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    RequestError,
    SpecdecError,
)

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(hybrid: Path) -> Iterator[SpecEngine]:
    with SpecEngine(hybrid, dtype="float64", seed=5) as engine:
        yield engine


def test_generate_keeps_the_order_of_prompts(engine: SpecEngine) -> None:
    prompts = ["one", [1, 2, 3], "def f():", [7]]
    together = engine.generate(prompts, GREEDY)
    alone = [engine.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.prompt_token_ids for c in together][1] == (1, 2, 3)


def test_generate_takes_params_for_each_prompt(engine: SpecEngine) -> None:
    params = [GREEDY, SamplingParams(max_tokens=3, seed=1, ignore_eos=True)]
    first, second = engine.generate(["a", "b"], params)
    assert (len(first.token_ids), len(second.token_ids)) == (12, 3)
    assert (first.finish_reason, second.finish_reason) == ("length", "length")


def test_prompts_submitted_together_share_steps(engine: SpecEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows share a step must not depend on the caller's speed: it changes the last bits."""
    sizes: list[int] = []
    scheduler = engine.model.loop.scheduler
    plan = scheduler.schedule

    def planned() -> StepPlan:
        made = plan()
        sizes.append(len(made.rows))
        return made

    monkeypatch.setattr(scheduler, "schedule", planned)
    # Without drafts: a row with an accepted draft would end a step before the others.
    params = SamplingParams(max_tokens=5, ignore_eos=True, n=2, speculate=False)
    for _ in range(20):
        sizes.clear()
        engine.generate([[1 + i] for i in range(4)], params)
        assert sizes == [8] * 5


def test_text_equals_the_decoded_tokens(engine: SpecEngine) -> None:
    assert engine.tokenizer is not None
    done = engine.generate("import os", SamplingParams(max_tokens=40, seed=3, ignore_eos=True))[0]
    assert done.text == engine.tokenizer.decode(done.token_ids)


def test_stats_count_plain_decoding(hybrid: Path) -> None:
    with SpecEngine(hybrid, draft="none") as engine:
        stats = engine.generate([1, 2, 3], GREEDY)[0].stats
        assert engine.stats().steps == stats.steps
    # The first token came from prefill, which verified nothing.
    assert (stats.prompt_tokens, stats.output_tokens, stats.steps) == (3, 12, 11)
    assert (stats.acceptance_length, stats.drafted, stats.accepted) == (1.0, 0, 0)
    assert 0 < stats.queued_s <= stats.first_token_s <= stats.total_s


def test_a_seed_fixes_the_text_and_no_seed_varies_it(engine: SpecEngine) -> None:
    seeded = SamplingParams(max_tokens=20, seed=11, ignore_eos=True)
    assert engine.generate("x", seeded)[0].text == engine.generate("x", seeded)[0].text
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    assert engine.generate("x", free)[0].text != engine.generate("x", free)[0].text


def test_an_engine_seed_repeats_a_run(hybrid: Path) -> None:
    def run() -> list[str]:
        with SpecEngine(hybrid, seed=9) as engine:
            return [
                c.text for c in engine.generate(["a", "b"], SamplingParams(max_tokens=8, ignore_eos=True))
            ]

    assert run() == run()


def test_choices_differ_and_the_first_is_the_single_one(engine: SpecEngine) -> None:
    many = engine.generate("x", SamplingParams(max_tokens=16, seed=4, n=3, ignore_eos=True))
    one = engine.generate("x", SamplingParams(max_tokens=16, seed=4, ignore_eos=True))
    assert [c.index for c in many] == [0, 1, 2]
    assert len({c.token_ids for c in many}) == 3
    assert many[0].token_ids == one[0].token_ids


def test_a_stop_string_cuts_the_text_and_is_never_streamed(engine: SpecEngine) -> None:
    params = SamplingParams(max_tokens=60, seed=2, ignore_eos=True)
    full = engine.generate("x", params)[0].text
    stop = full[9:12]
    cut = full[: full.index(stop)]

    async def read() -> list[str]:
        stopped = params.model_copy(update={"stop": [stop]})
        return [delta.text async for delta in engine.stream("x", stopped)]

    pieces = asyncio.run(read())
    assert "".join(pieces) == cut
    assert engine.generate("x", params.model_copy(update={"stop": stop}))[0].finish_reason == "stop"


def test_a_stop_token_ends_the_output(engine: SpecEngine) -> None:
    tokens = engine.generate([5], GREEDY)[0].token_ids
    done = engine.generate([5], GREEDY.model_copy(update={"stop_token_ids": [tokens[4]]}))[0]
    assert done.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert done.finish_reason == "stop"


def test_eos_ends_the_output_unless_ignored(engine: SpecEngine) -> None:
    forced = SamplingParams(max_tokens=9, temperature=0.0, logit_bias={256: 100.0})
    done = engine.generate([5], forced)[0]
    assert (done.token_ids, done.text, done.finish_reason) == ((256,), "", "stop")
    ignoring = engine.generate([5], forced.model_copy(update={"ignore_eos": True}))[0]
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (9, "length")


def test_logprobs_name_the_chosen_and_the_likeliest(engine: SpecEngine) -> None:
    done = engine.generate([5, 6], GREEDY.model_copy(update={"logprobs": 3}))[0]
    assert done.logprobs is not None and len(done.logprobs) == 12
    for token, logprob in zip(done.token_ids, done.logprobs, strict=True):
        assert logprob.token_id == token == logprob.top[0][0]
        assert logprob.logprob == pytest.approx(logprob.top[0][1]) and logprob.logprob <= 0
        assert len(logprob.top) == 3
    assert engine.generate([5, 6], GREEDY)[0].logprobs is None


def test_penalties_change_the_text_and_logit_bias_bans(engine: SpecEngine) -> None:
    plain = engine.generate([5], GREEDY)[0].token_ids
    banned = engine.generate([5], GREEDY.model_copy(update={"logit_bias": {plain[0]: -100.0}}))[0].token_ids
    assert plain[0] not in banned
    long = GREEDY.model_copy(update={"max_tokens": 40, "frequency_penalty": 2.0, "presence_penalty": 2.0})
    varied = engine.generate([5], long)[0].token_ids
    repeated = engine.generate([5], GREEDY.model_copy(update={"max_tokens": 40}))[0].token_ids
    assert len(set(varied)) > len(set(repeated))


def test_output_is_cut_at_the_models_length(hybrid: Path) -> None:
    with SpecEngine(hybrid, max_model_len=20) as engine:
        done = engine.generate([1] * 15, SamplingParams(max_tokens=100, ignore_eos=True))[0]
        assert (len(done.token_ids), done.finish_reason) == (5, "length")


def test_stream_pieces_join_to_the_completion(engine: SpecEngine) -> None:
    params = SamplingParams(max_tokens=30, seed=8, n=2, ignore_eos=True)

    async def read() -> dict[int, str]:
        texts = {0: "", 1: ""}
        ended = []
        async for delta in engine.stream("import os", params):
            texts[delta.index] += delta.text
            if delta.finish_reason:
                ended.append(delta.index)
                assert delta.stats is not None
        assert sorted(ended) == [0, 1]
        return texts

    assert list(asyncio.run(read()).values()) == [c.text for c in engine.generate("import os", params)]


def test_closing_the_iterator_cancels_and_returns_the_memory(hybrid: Path) -> None:
    with SpecEngine(hybrid, max_model_len=512) as engine:

        async def leave_early() -> None:
            stream = engine.stream("x", SamplingParams(max_tokens=400, ignore_eos=True))
            async for _ in stream:
                break
            await stream.aclose()

        asyncio.run(leave_early())
        engine.generate("y", GREEDY)
        # The engine handles a cancellation between steps, so before it ended a later request.
        engine.model.loop.check_idle()


def test_many_threads_and_tasks_share_an_engine(engine: SpecEngine) -> None:
    expected = {i: engine.generate([i], GREEDY)[0].token_ids for i in range(8)}
    found: dict[int, tuple[int, ...]] = {}

    def call(i: int) -> None:
        found[i] = engine.generate([i], GREEDY)[0].token_ids

    threads = [threading.Thread(target=call, args=(i,)) for i in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected

    async def gather() -> list[tuple[int, ...]]:
        async def one(i: int) -> tuple[int, ...]:
            return tuple([t async for delta in engine.stream([i], GREEDY) for t in delta.token_ids])

        return await asyncio.gather(*(one(i) for i in expected))

    assert asyncio.run(gather()) == list(expected.values())


def test_invalid_items_of_a_parameter_list_are_refused(engine: SpecEngine) -> None:
    with pytest.raises(RequestError, match="params: None is not SamplingParams"):
        engine.generate([[1], [2]], [GREEDY, None])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one"),
        ([0, 320], "token id 320"),
        ([-1], "token id -1"),
        ([1] * 600, "max_model_len"),
        ([1, True], "neither text nor token ids"),
    ],
)
def test_a_prompt_the_model_cannot_read_is_refused(
    engine: SpecEngine, prompt: list[int], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate([prompt], GREEDY)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({}, "the model supports no more: shorten the prompt."),
        ({"max_model_len": 100}, "raise max_model_len, up to 512."),
        (
            {"memory_bytes": 60_000},
            "bytes of memory_bytes hold no more: shorten the prompt or raise memory_bytes.",
        ),
    ],
)
def test_a_long_prompt_is_refused_with_a_remedy(hybrid: Path, fields: dict[str, object], remedy: str) -> None:
    with SpecEngine(hybrid, draft="none", **fields) as engine, pytest.raises(RequestError) as caught:
        engine.generate([[1] * 600])
    assert remedy in str(caught.value)


def test_an_error_in_a_list_names_the_prompt(engine: SpecEngine) -> None:
    for prompts, place in ((["fine", [], "x"], 1), (["fine", "x", [9999]], 2), (["fine", 5], 1)):
        with pytest.raises(RequestError, match=rf"^prompts\[{place}\]: (?!prompt:)") as caught:
            engine.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match=r"^prompts\[1\]: stop_token_ids: "):
        engine.generate(["a", "b"], [GREEDY, SamplingParams(stop_token_ids=[999])])
    with pytest.raises(RequestError, match=r"^prompt: "):
        engine.generate([[9999]], GREEDY)


@pytest.mark.parametrize("changes", [{"stop_token_ids": [320]}, {"logit_bias": {999: 1.0}}])
def test_parameters_outside_the_vocabulary_are_refused(
    engine: SpecEngine, changes: dict[str, object]
) -> None:
    with pytest.raises(RequestError, match=next(iter(changes))):
        engine.generate("x", SamplingParams(**changes))  # type: ignore[arg-type]


def test_one_bad_prompt_leaves_the_engine_whole(engine: SpecEngine) -> None:
    with pytest.raises(RequestError):
        engine.generate(["fine", [9999]], GREEDY)
    assert engine.generate("fine", GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"draft": "mtp"}, ConfigError, "draft"),
        ({"draft": "eagle"}, ConfigError, "draft_model"),
        ({"kernels": "triton", "dtype": "float64"}, ConfigError, "kernels"),
        ({"draft": "suffix", "num_steps": 2, "synthetic_acceptance": 4}, ConfigError, "synthetic_acceptance"),
        ({"kernels": "native", "dtype": "float16"}, ConfigError, "kernels"),
        ({"memory_bytes": "900TiB"}, CapacityError, "memory_bytes"),
        ({"max_model_len": 4096}, ConfigError, "max_model_len"),
        ({"memory_bytes": 1000}, CapacityError, "memory_bytes"),
        ({"devise": "cpu"}, ConfigError, "devise"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    hybrid: Path, fields: dict[str, object], error: type[SpecdecError], field: str
) -> None:
    with pytest.raises(error, match=field) as caught:
        SpecEngine(hybrid, **fields)
    assert caught.value.field == field


def test_a_config_object_and_fields_combine(hybrid: Path) -> None:
    with SpecEngine(hybrid, EngineConfig(max_model_len=64), dtype="float64") as engine:
        assert engine.model.settings.max_model_len == 64
        assert str(engine.model.settings.dtype) == "torch.float64"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        SpecEngine(tmp_path / "nowhere")


@pytest.mark.parametrize("prompt", [None, 5, ["a", 5], "\ud800", [1.5]])
def test_invalid_prompts_are_refused(engine: SpecEngine, prompt: object) -> None:
    with pytest.raises(RequestError, match="prompt"):
        engine.generate(prompt, GREEDY)  # type: ignore[arg-type]


def test_token_ids_may_come_as_a_tensor(engine: SpecEngine) -> None:
    expected = engine.generate([1, 2, 3], GREEDY)[0].token_ids
    assert engine.generate(torch.tensor([1, 2, 3]), GREEDY)[0].token_ids == expected  # type: ignore[arg-type]
    assert engine.generate([torch.tensor([1, 2, 3])], GREEDY)[0].token_ids == expected  # type: ignore[list-item]


def test_params_of_another_type_are_refused(engine: SpecEngine) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        engine.generate("x", {"max_tokens": 3})  # type: ignore[arg-type]


def test_a_text_that_cannot_fit_is_refused_before_tokenisation(monkeypatch: pytest.MonkeyPatch) -> None:
    with SpecEngine("tiny", max_model_len=64, draft="none") as engine:
        assert engine.tokenizer
        longest = engine.tokenizer.longest
        words = max(engine.tokenizer.inner.get_vocab(), key=len)
        assert len(engine.tokenizer.decode(engine.tokenizer.encode(words))) <= longest
        with pytest.raises(RequestError, match="max_model_len is 64"):
            engine.prepare("a" * (64 * longest), SamplingParams())  # fits by characters, but not by tokens

        def encode(text: str, **_: bool) -> list[int]:
            raise AssertionError("it was read")

        monkeypatch.setattr(engine.tokenizer, "encode", encode)
        with pytest.raises(RequestError, match="characters, which 64 tokens"):
            engine.prepare("a" * (64 * longest + 1), SamplingParams())


def test_without_a_tokenizer_texts_are_refused_and_token_ids_read(hybrid: Path, tmp_path: Path) -> None:
    for file in hybrid.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    with SpecEngine(tmp_path, draft="none") as engine:
        with pytest.raises(
            RequestError, match=r"no tokenizer\.json; add it, or pass token ids .*--prompt-ids"
        ):
            engine.generate("text")
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids) == 2


def test_a_prompt_is_searched_once_for_all_of_its_choices(
    engine: SpecEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 128 choices of a long prompt, repeated searches would block the event loop 128 times as long."""
    searched: list[int] = []

    def isin(given: np.ndarray, values: list[int]) -> np.ndarray:
        searched.append(len(given))
        return found(given, values)

    found = np.isin
    monkeypatch.setattr(np, "isin", isin)
    engine.generate([list(range(40)), [1, 2]], SamplingParams(max_tokens=1, n=8))
    assert searched == [40, 2]
