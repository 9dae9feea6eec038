"""Allowed tokens and bad words along every path of a draft, and stop strings and stop tokens."""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specdec import ConfigError, RequestError, SamplingParams, SpecEngine, Structure
from specdec.config.sampling import MAX_IDS
from specdec.verify.limits import AllowedTokens, BadWords
from tests.lossless.cases import BAD_WORDS, SHAPES
from tests.models.agreeing import END

LIKELY = dict.fromkeys(range(4), 6.0)
"""The letters a to d, which form the words."""
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "device, no drafts": {"draft": "none", "graphs": True},
    "chain": {"draft": "mtp", **SHAPES["chain"]},
    "tree": {"draft": "mtp", **SHAPES["tree"]},
    "device tree": {"draft": "mtp", "graphs": True, **SHAPES["tree"]},
    "suffix": {"draft": "suffix", **SHAPES["chain"]},
}


@pytest.fixture(scope="module")
def engines(family_folder: Callable[..., Path]) -> Iterator[dict[str, SpecEngine]]:
    folder = family_folder("qwen3_next")
    made = {}
    for name, fields in ENGINES.items():
        adaptive = {} if fields["draft"] == "none" else {"adaptive": False}
        made[name] = SpecEngine(folder, dtype="float64", max_model_len=96, **adaptive, **fields)
    yield made
    for engine in made.values():
        engine.close()


def write(engine: SpecEngine, **fields: Any) -> Any:
    own = {"max_tokens": 48, "seed": 3, "ignore_eos": True, "logit_bias": LIKELY, **fields}
    return engine.generate([[5, 9]], SamplingParams(**own))[0]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_bad_words_never_appear_and_drafts_do_not_change_the_text(
    engines: dict[str, SpecEngine], temperature: float
) -> None:
    free = write(engines["plain"], temperature=temperature).text
    words = [*BAD_WORDS, free[8:10], free[20:23]]  # some of these would occur
    texts = {}
    for name, engine in engines.items():
        own = write(engine, temperature=temperature, bad_words=words)
        assert not any(word in own.text for word in words), name
        texts[name] = own.token_ids
        if "none" not in ENGINES[name]["draft"]:
            assert own.stats.accepted > 0, "drafts keep to it"
    assert len(set(texts.values())) == 1, texts


def test_a_rule_that_forgets_the_path_is_caught(
    engines: dict[str, SpecEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = BadWords.words

    def forgetful(self: BadWords, path: Sequence[int]) -> Tensor | None:
        return words(self, ())

    plain = write(engines["plain"], temperature=0.7, bad_words=BAD_WORDS).token_ids
    monkeypatch.setattr(BadWords, "words", forgetful)
    assert write(engines["plain"], temperature=0.7, bad_words=BAD_WORDS).token_ids == plain
    with pytest.raises(RequestError, match="bad_words"):
        write(engines["tree"], temperature=0.7, bad_words=BAD_WORDS)


def test_only_allowed_tokens_are_written(engines: dict[str, SpecEngine]) -> None:
    tokens = [3, 8, 21, END]
    for temperature in (0.0, 1.0):
        found = {
            write(engine, temperature=temperature, logit_bias=None, allowed_token_ids=tokens).token_ids
            for engine in engines.values()
        }
        assert len(found) == 1 and set(*found) <= {*tokens}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"allowed_token_ids": [0], "bad_words": ["aa"]}, "bad_words"),
        ({"allowed_token_ids": [0], "structured_outputs": Structure(regex="b+")}, "allowed_token_ids"),
        ({"structured_outputs": Structure(regex="(abcd)+"), "bad_words": ["bc"]}, "bad_words"),
        ({"allowed_token_ids": [END], "ignore_eos": False, "min_tokens": 5}, "min_tokens"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": list(range(64)), "min_tokens": 5}, "min_tokens"),
    ],
)
def test_a_request_with_no_allowed_token_fails_alone(
    engines: dict[str, SpecEngine], fields: dict[str, Any], field: str
) -> None:
    for engine in (engines["plain"], engines["tree"]):
        with pytest.raises(RequestError) as caught:
            write(engine, **fields)
        assert caught.value.field == field and str(caught.value).startswith(f"{field}: ")
        assert len(write(engine).token_ids) == 48


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [64]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * 65}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["ab" * 100]}, "bad_words"),
        ({"allowed_token_ids": range(MAX_IDS + 1)}, "allowed_token_ids"),
        ({"stop_token_ids": range(MAX_IDS + 1)}, "stop_token_ids"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
    ],
)
def test_a_value_that_does_not_fit_is_named(
    engines: dict[str, SpecEngine], fields: dict[str, Any], field: str
) -> None:
    with pytest.raises((ConfigError, RequestError)) as caught:
        write(engines["plain"], **fields)
    assert caught.value.field == field and "\n" not in str(caught.value)


def test_a_request_looks_at_its_parameters_once(
    engines: dict[str, SpecEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all its prompts and choices, including repeated ones."""
    made, read = [], []
    begin, checked = AllowedTokens.__init__, SamplingParams.checked

    def count(self: AllowedTokens, tokens: Collection[int], vocab: int) -> None:
        made.append(len(tokens))
        begin(self, tokens, vocab)

    def read_anew(self: SamplingParams) -> SamplingParams:
        read.append(self)
        return checked(self)

    monkeypatch.setattr(AllowedTokens, "__init__", count)
    monkeypatch.setattr(SamplingParams, "checked", read_anew)
    params = SamplingParams(max_tokens=2, n=3, allowed_token_ids=[3, 8, 21] * 1000, stop_token_ids=[9] * 999)
    assert (params.allowed_token_ids, params.stop_token_ids) == ([3, 8, 21], [9])
    done = engines["plain"].generate([[5, 9]] * 4, params)
    assert len(done) == 12 and all({*own.token_ids} <= {3, 8, 21} for own in done)
    assert (made, len(read)) == ([3], 1)


def test_eos_has_no_stop_reason_even_if_also_requested(engines: dict[str, SpecEngine]) -> None:
    """As in vLLM, which checks the model's EOS first."""
    for ignored, reason in ((False, None), (True, END)):
        own = write(engines["plain"], logit_bias={END: 100.0}, stop_token_ids=[END, 8], ignore_eos=ignored)
        assert (own.finish_reason, own.stop_reason) == ("stop", reason)


def test_synthetic_acceptance_refuses_bad_words(family_folder: Callable[..., Path]) -> None:
    with SpecEngine(family_folder("qwen3_next"), draft="mtp", synthetic_acceptance=2.0) as engine:
        for field, value in (("bad_words", ["a"]), ("allowed_token_ids", [1])):
            with pytest.raises(RequestError) as caught:
                engine.generate([[1]], SamplingParams(**{field: value}))
            assert caught.value.field == field


@pytest.mark.parametrize("name", ["plain", "tree"])
def test_the_stop_string_is_included_on_request(engines: dict[str, SpecEngine], name: str) -> None:
    whole = write(engines[name]).text
    stop, fields = whole[10:13], {"include_stop_str_in_output": True}
    at = whole.index(stop)
    assert write(engines[name], stop=stop).text == whole[:at]
    own = write(engines[name], stop=stop, **fields)
    assert (own.text, own.finish_reason) == (whole[: at + 3], "stop")
    token = own.token_ids[6]
    first = own.token_ids.index(token)
    assert write(engines[name], stop_token_ids=[token]).text == whole[:first]
    assert write(engines[name], stop_token_ids=[token], **fields).text == whole[: first + 1]


def test_special_tokens_are_decoded_on_request(engines: dict[str, SpecEngine]) -> None:
    engine, end = engines["tree"], {"logit_bias": {END: 100.0}, "max_tokens": 3}
    mark = "<|end|>"
    assert write(engine, **end).text == ""
    assert write(engine, skip_special_tokens=False, **end).text == 3 * mark
    ended = {"ignore_eos": False, "skip_special_tokens": False, **end}
    assert write(engine, **ended).text == ""
    own = write(engine, include_stop_str_in_output=True, **ended)
    assert (own.text, own.finish_reason, len(own.token_ids)) == (mark, "stop", 1)
    assert write(engine, **end).text == "", "the engine's own tokenizer is as it was"
