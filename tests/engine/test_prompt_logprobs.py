"""Log-probabilities of prompt tokens, and minimum lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec import Completion, SamplingParams, SpecEngine
from tests.lossless.cases import EXACT
from tests.server.tools.scripted import write_scripted
from tests.text.test_text import cut


def plain(done: Completion) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
    assert done.logprobs is not None
    return [(logprob.token_id, logprob.logprob, logprob.top) for logprob in done.logprobs]


@pytest.mark.parametrize(
    "fields",
    [
        {"draft": "none"},
        {"draft": "ngram", "chunk_tokens": 7},
        {"draft": "none", "chunk_tokens": 1},
        {"draft": "ngram", "chunk_tokens": 64, "max_running": 1},
    ],
)
def test_prompt_log_probabilities_equal_those_of_decoding(hybrid: Path, fields: dict[str, Any]) -> None:
    """Scores an unfiltered sample again as a prompt, next to a request without prompt_logprobs."""
    writes = SamplingParams(max_tokens=30, temperature=1.0, seed=4, logprobs=3, ignore_eos=True)
    reads = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3)
    with SpecEngine(hybrid, dtype="float64", max_model_len=128, **fields) as engine:
        written = engine.generate([[5, 9, 2], [7]], writes)
        prompts = [[*own.prompt_token_ids, *own.token_ids] for own in written]
        read = engine.generate([*prompts, [3]], [reads, reads, SamplingParams(max_tokens=2)])
    for before, after in zip(written, read, strict=False):
        found = after.prompt_logprobs
        assert found is not None and found[0] is None and len(found) == len(after.prompt_token_ids)
        assert [own.token_id for own in found if own] == list(after.prompt_token_ids[1:])
        for (token, logprob, top), own in zip(plain(before), found[-30:], strict=True):
            assert own
            assert (own.token_id, own.logprob) == (token, pytest.approx(logprob, abs=EXACT))
            assert [alternative for alternative, _ in own.top] == [alternative for alternative, _ in top]
    assert read[2].prompt_logprobs is None


def test_they_survive_preemptions(hybrid: Path) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    with SpecEngine(hybrid, dtype="float64", max_model_len=128, chunk_tokens=4, draft="none") as engine:
        scheduler = engine.model.loop.scheduler
        plan, taken = scheduler.schedule, [3, 6, 9]

        def lose() -> Any:
            """Preempt the request after some of its steps."""
            taken[:] = [steps - 1 for steps in taken]
            if 0 in taken and scheduler.running:
                scheduler.preempt(scheduler.running[-1])
            return plan()

        scheduler.schedule = lose  # type: ignore[method-assign]
        (whole,) = engine.generate([list(range(1, 18))], params)
        assert whole.stats.preemptions == 3
    assert whole.prompt_logprobs is not None
    assert [logprob and logprob.token_id for logprob in whole.prompt_logprobs] == [None, *range(2, 18)]


def test_a_single_token_has_none(hybrid: Path) -> None:
    with SpecEngine(hybrid, draft="none") as engine:
        (own,) = engine.generate([[3]], SamplingParams(max_tokens=1, prompt_logprobs=2))
    assert own.prompt_logprobs == (None,)


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_nothing_ends_an_output_before_its_least_length(hybrid: Path, draft: str) -> None:
    """Neither EOS nor a stop token is chosen, and a stop string is ordinary text."""
    ends = {"stop_token_ids": list(range(40)), "logit_bias": dict.fromkeys(range(40), 50.0)}
    with SpecEngine(hybrid, dtype="float64", draft=draft) as engine:
        for least in (0, 1, 5):
            params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, min_tokens=least, **ends)
            for own in engine.generate([[1], [2]], params):
                assert len(own.token_ids) == least + 1 and own.token_ids[-1] < 40
                assert all(token >= 40 for token in own.token_ids[:-1])
        only = {"temperature": 0.0, "logit_bias": {engine.tokenizer.encode("a")[0]: 100.0}}  # type: ignore[union-attr]
        for stop, length in (("aa", 6), ("aaa", 5)):
            params = SamplingParams(max_tokens=20, min_tokens=7, stop=stop, **only)
            (own,) = engine.generate([[1]], params)
            assert (own.text, own.finish_reason, len(own.token_ids)) == ("a" * length, "stop", 8)


SCRIPT = "One end, two ends; an end in between: bend it to the end of ends."


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that generates the script."""
    folder = tmp_path_factory.mktemp("spoken")
    write_scripted(folder, {"1": SCRIPT}, "{{ messages[-1].content }}")
    return folder


@pytest.mark.parametrize("draft", ["none", "suffix"])
def test_a_stop_string_that_ends_after_the_least_length_ends_the_output(spoken: Path, draft: str) -> None:
    """Wherever it begins, and however many tokens a step accepts; one that ends before is ordinary text."""
    stops = ["end", "ends;", "n bet"]
    with SpecEngine(spoken, draft=draft, dtype="float32", adaptive=False) as engine:
        (whole,) = engine.generate(["1"], SamplingParams(max_tokens=99, temperature=0.0))
        assert whole.text == SCRIPT and engine.tokenizer
        lengths = [len(engine.tokenizer.decode(whole.token_ids[:n])) for n in range(len(whole.token_ids))]
        for least, length in enumerate(lengths):
            params = SamplingParams(max_tokens=99, min_tokens=least, stop=stops, temperature=0.0)
            (own,) = engine.generate(["1"], params)
            assert own.text == cut(SCRIPT, stops, after=length), least
        assert (whole.stats.drafted == 0) and (own.stats.acceptance_length > 2) == (draft == "suffix")


@pytest.mark.parametrize("fields", [{"draft": "none", "chunk_tokens": 4}, {"draft": "ngram"}])
def test_a_prompt_may_be_read_alone(hybrid: Path, fields: dict[str, Any]) -> None:
    """Nothing is generated, whatever else is requested; a neighbour's text is unchanged."""
    alone = SamplingParams(max_tokens=0, prompt_logprobs=2, logprobs=1, n=2, stop="a")
    writes = SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=2, ignore_eos=True)
    prompts = [[5, 9, 2, 7, 5, 9], [5, 9, 2, 7, 5, 9]]
    with SpecEngine(hybrid, dtype="float64", max_model_len=64, **fields) as engine:
        *read, written = engine.generate(prompts, [alone, writes])
        (again,) = engine.generate(prompts[:1], writes)
        assert engine.stats().running == engine.stats().waiting == 0
    # The batch width changes the last bits of logprobs.
    assert written == replace(again, stats=written.stats, prompt_logprobs=written.prompt_logprobs)
    for own in read:
        assert (own.text, own.token_ids, own.logprobs, own.finish_reason) == ("", (), (), "length")
        assert own.stats.output_tokens == own.stats.steps == 0
    for own in (*read, again):
        assert own.prompt_logprobs and written.prompt_logprobs
        for mine, other in zip(own.prompt_logprobs[1:], written.prompt_logprobs[1:], strict=True):
            assert mine and other
            assert (mine.token_id, mine.logprob) == (other.token_id, pytest.approx(other.logprob, abs=EXACT))
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]
