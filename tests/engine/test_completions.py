"""The Python API's completions: finish reasons, log-probabilities, errors, and accepted input types."""

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Completion, Delta, EngineError, SamplingParams, SpecdecError, SpecEngine
from specdec.core.request import Request

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
IDS = [5, 9, 2]


@pytest.fixture(scope="module")
def engine(hybrid: Path) -> Any:
    with SpecEngine(hybrid, max_model_len=128, seed=3) as engine:
        yield engine


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(IDS),
        np.array(IDS),
        np.array(IDS, dtype=np.uint8),
        torch.tensor(IDS),
        [np.int64(i) for i in IDS],
        list(torch.tensor(IDS)),
        dict.fromkeys(IDS).keys(),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_are_taken_in_any_form(engine: SpecEngine, prompt: Any) -> None:
    (wanted,) = engine.generate(IDS, GREEDY)
    (found,) = engine.generate(prompt, GREEDY)
    assert found.prompt_token_ids == tuple(IDS) and found.token_ids == wanted.token_ids
    both = engine.generate(np.array([IDS, IDS]), GREEDY)
    assert [own.token_ids for own in both] == [wanted.token_ids] * 2


@pytest.mark.parametrize(
    "ids",
    [
        [4, 7],
        (4, 7),
        {4, 7},
        frozenset((4, 7)),
        np.array([4, 7]),
        torch.tensor([4, 7]),
        (np.int32(4), np.uint8(7)),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_settings_take_numbers_in_any_form(ids: Any) -> None:
    params = SamplingParams(
        stop_token_ids=ids,
        max_tokens=np.int64(9),
        temperature=np.float32(0.5),
        stop=("a", "b"),
        seed=np.int64(3),
        logit_bias={np.int64(4): np.float64(2.0)},  # type: ignore[dict-item]
    )
    plain = SamplingParams(
        stop_token_ids=[4, 7], max_tokens=9, temperature=0.5, stop=["a", "b"], seed=3, logit_bias={4: 2.0}
    )
    assert params.model_copy(update={"stop_token_ids": sorted(params.stop_token_ids or ())}) == plain


@pytest.mark.parametrize("ids", [np.array([1.5]), torch.tensor([True]), np.array([[1]]), {"a"}])
def test_invalid_token_ids_are_refused_in_any_form(ids: Any) -> None:
    with pytest.raises(SpecdecError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=ids)


def test_stop_reason_is_reported(engine: SpecEngine) -> None:
    (whole,) = engine.generate(IDS, GREEDY)
    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    token = whole.token_ids[3]
    at = whole.token_ids.index(token)
    (ended,) = engine.generate(IDS, SamplingParams(**{**GREEDY.model_dump(), "stop_token_ids": {token}}))
    assert (ended.finish_reason, ended.stop_reason, len(ended.token_ids)) == ("stop", token, at + 1)
    text = whole.text[2:4]
    (cut,) = engine.generate(IDS, SamplingParams(**{**GREEDY.model_dump(), "stop": ("never this", text)}))
    assert (cut.finish_reason, cut.stop_reason) == ("stop", text) and text not in cut.text


def test_log_probabilities_have_the_texts_of_their_tokens(engine: SpecEngine) -> None:
    assert engine.tokenizer
    spell = engine.tokenizer.spell
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (own,) = engine.generate(IDS, params)
    assert own.logprobs and own.prompt_logprobs and own.prompt_logprobs[0] is None
    assert [logprob and logprob.token_id for logprob in own.prompt_logprobs] == [None, *IDS[1:]]
    for each in (*own.logprobs, *own.prompt_logprobs[1:]):
        assert each and each.decoded_token == spell(each.token_id)
        assert each.decoded_top == tuple(spell(token) for token, _ in each.top)
    assert own.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in own.logprobs))
    assert engine.generate(IDS, GREEDY)[0].cumulative_logprob is None


def test_a_stream_equals_a_completion(hybrid: Path) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, prompt_logprobs=0, stop="\u0000")

    async def listen() -> list[Any]:
        async with SpecEngine(hybrid, max_model_len=128) as engine:
            async with contextlib.aclosing(engine.stream(IDS, params)) as deltas:
                heard = [delta async for delta in deltas]
            (whole,) = engine.generate(IDS, params)
        with pytest.raises(EngineError, match="closed"):
            engine.generate(IDS, params)
        return [Completion.of(IDS, 0, heard), whole]

    streamed, whole = asyncio.run(listen())
    for name in ("text", "token_ids", "stop_reason", "finish_reason"):
        assert getattr(streamed, name) == getattr(whole, name)
    for name in ("logprobs", "prompt_logprobs"):
        texts = [[own and own.decoded_token for own in getattr(each, name)] for each in (streamed, whole)]
        assert texts[0] == texts[1] and any(texts[0])


def test_prompt_log_probabilities_are_decoded_once_each_and_in_threads(
    engine: SpecEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, spelled = engine.tokenizer, list[tuple[int, bool]]()
    assert tokenizer
    right = tokenizer.spell

    def spell(token: int) -> str:
        spelled.append((token, threading.current_thread() is threading.main_thread()))
        return right(token)

    async def run() -> list[Delta]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=20)
        return [delta async for delta in engine.stream([5, 9] * 30, params)]

    monkeypatch.setattr(tokenizer, "spell", spell)
    (delta,) = asyncio.run(run())
    found = delta.prompt_logprobs or ()
    shown = {token for own in found if own for token in (own.token_id, *(each for each, _ in own.top))}
    assert sorted(token for token, _ in spelled) == sorted(shown) and not any(main for _, main in spelled)
    assert all(own.decoded_token == right(own.token_id) for own in found if own)


def test_one_that_fails_leaves_the_others_their_texts(engine: SpecEngine, monkeypatch: Any) -> None:
    wanted = engine.generate([[4, 4], IDS, [7]], GREEDY)
    send = Request.send

    def fail(request: Request, item: Any) -> None:
        """Send a failure to the first prompt's request after its third token, and nothing afterwards."""
        if request.tokens[:2] != [4, 4] or request.output_length < 3:
            send(request, item)
        elif not request.cancelled:
            request.cancelled = True
            send(request, EngineError("It failed."))

    monkeypatch.setattr(Request, "send", fail)
    with pytest.raises(EngineError, match="It failed") as caught:
        engine.generate([[4, 4], IDS, [7]], GREEDY)
    failed, *others = caught.value.completions
    assert [own.token_ids for own in others] == [own.token_ids for own in wanted[1:]]
    assert [own.error for own in others] == [None, None]
    assert (failed.finish_reason, str(failed.error)) == ("error", str(caught.value))
    assert failed.token_ids == wanted[0].token_ids[: len(failed.token_ids)]


def test_choices_of_a_prompt_stand_together(engine: SpecEngine) -> None:
    done = engine.generate([IDS, [7]], SamplingParams(max_tokens=4, n=3, ignore_eos=True))
    assert [own.index for own in done] == [0, 1, 2] * 2
    assert [own.prompt_token_ids for own in done] == [tuple(IDS)] * 3 + [(7,)] * 3


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_shown_on_stderr_on_request(
    engine: SpecEngine, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.generate([IDS, [7]], GREEDY, shown)
    captured = capsys.readouterr()
    assert captured.out == "" and ("2/2" in captured.err) == shown == bool(captured.err)
