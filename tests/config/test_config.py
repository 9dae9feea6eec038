"""Settings: accepted and refused values, and the remedies in refusals."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config.base import Settings
from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.config.structured import Structure
from specdec.errors import ConfigError

NAN, INF = math.nan, math.inf


def test_the_defaults_equal_the_documented_api() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert (params.n, params.seed, params.stop, params.logprobs, params.ignore_eos) == (
        1,
        None,
        None,
        None,
        False,
    )
    config = EngineConfig()
    assert (config.device, config.dtype, config.kernels, config.draft) == ("auto", "auto", "auto", "auto")
    assert (config.slots, config.chunk_tokens, config.memory_bytes, config.adaptive) == (
        "record",
        512,
        None,
        True,
    )


def test_the_fields_are_those_of_the_api() -> None:
    """The names are stable: the command line and the server take theirs from here."""
    assert " ".join(SamplingParams.model_fields) == (
        "max_tokens temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty stop "
        "stop_token_ids include_stop_str_in_output skip_special_tokens ignore_eos seed logprobs logit_bias "
        "allowed_token_ids bad_words n min_tokens prompt_logprobs cache_salt cache_marks structured_outputs "
        "thinking speculate trees"
    )
    assert " ".join(EngineConfig.model_fields) == (
        "device dtype kv_dtype quantize draft draft_model draft_vocab draft_window num_steps topk "
        "num_draft_tokens adaptive draft_noise slots memory_bytes max_running max_model_len chunk_tokens "
        "prefix_cache prefix_policy prefix_alpha host_cache_bytes kernels graphs tp seed "
        "synthetic_acceptance"
    )


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [-1, 1.5, "3", True, None]),
        ("temperature", [-0.1, NAN, INF, "0.7", None, True]),
        ("top_p", [0, -1, 1.1, NAN, "1"]),
        ("top_k", [-2, 1.5, "5", None]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0, -1, INF, NAN]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("stop", ["", ["a", ""], 5, [5], {"a": 1}]),
        ("stop_token_ids", [5, [-1], ["5"], [1.0]]),
        ("ignore_eos", [1, "yes", None]),
        ("seed", [2**63, -(2**63) - 1, 1.0, "7"]),
        ("logprobs", [-1, 21, True, "3"]),
        ("logit_bias", [{5: 101}, {5: NAN}, {-1: 1.0}, {"5": 1.0}, [5], {5: None}]),
        ("n", [0, -1, 1.5, None]),
    ],
)
def test_wrong_sampling_values_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^SamplingParams\.{field} cannot be .*; give ") as caught:
            SamplingParams.model_validate({field: value})
        assert caught.value.field == field


@pytest.mark.parametrize(
    "given_values",
    [
        {"temperature": 0, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
        {"top_k": -1, "seed": -(2**63), "logprobs": 0},
        {"seed": 2**63 - 1, "logprobs": 20, "n": 3},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"stop": "a", "stop_token_ids": [], "logit_bias": {}},
        {
            "stop": ["a", "日本"],
            "stop_token_ids": [0, 5],
            "logit_bias": {0: -100, 7: 100},
            "ignore_eos": True,
        },
    ],
)
def test_right_sampling_values_are_kept(given_values: dict[str, Any]) -> None:
    params = SamplingParams.model_validate(given_values)
    assert {name: getattr(params, name) for name in given_values} == given_values


def test_temperatures_too_small_for_float32_are_greedy() -> None:
    assert SamplingParams(temperature=1e-6).temperature == 0.0
    assert SamplingParams(temperature=1e-5).temperature == 1e-5


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("device", ["tpu", "cuda:", "cuda:x", "CPU", 0, None]),
        ("dtype", ["fp8", None, 16]),
        ("draft", ["medusa", None]),
        ("draft_model", ["", 5]),
        ("num_steps", [0, 1.5, "3"]),
        ("topk", [0, -1]),
        ("num_draft_tokens", [1, 65]),
        ("adaptive", [None, "on"]),
        ("draft_noise", [None, "shared", 1]),
        ("slots", ["copy"]),
        ("memory_bytes", [0, -5, 1.5, "x", "2 XB", "1.2.3GB", "-1GB", "", ".", "GB", "0.1 B"]),
        ("max_running", [0, None]),
        ("max_model_len", [0, -1]),
        ("chunk_tokens", [0, None]),
        ("prefix_cache", [1]),
        ("kernels", ["cuda"]),
        ("seed", [2**63]),
        ("synthetic_acceptance", [0.9, NAN, [1.1], [-0.1], "3"]),
    ],
)
def test_wrong_engine_values_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^EngineConfig\.{field} cannot be .*; give ") as caught:
            EngineConfig.model_validate({"draft": "mtp", field: value})
        assert caught.value.field == field


def test_a_salt_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"cache_salt is not valid Unicode; give a string of 1 to 256"
    ) as caught:
        SamplingParams(cache_salt="a\ud800")
    assert caught.value.field == "cache_salt"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("2GiB", 2 << 30),
        ("1.5 GiB", 3 << 29),
        (" 512 mb ", 512_000_000),
        ("3k", 3000),
        ("7Ki", 7 << 10),
        ("1TB", 10**12),
        (None, None),
    ],
)
def test_memory_sizes_accept_units(said: int | str | None, meant: int | None) -> None:
    assert EngineConfig.of(None, {"memory_bytes": said}).memory_bytes == meant


@pytest.mark.parametrize(
    ("settings_class", "name", "hint"),
    [
        (SamplingParams, "temprature", "did you mean temperature?"),
        (SamplingParams, "max_token", "did you mean max_tokens"),
        (SamplingParams, "qqq", "known are max_tokens, temperature, "),
        (EngineConfig, "num_draft_token", "did you mean num_draft_tokens"),
        (EngineConfig, "memory", "did you mean memory_bytes?"),
    ],
)
def test_misspelt_names_get_suggestions(settings_class: type[Settings], name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_class.model_validate({name: 1})
    assert f"has no setting {name!r}; {hint}" in str(caught.value)
    assert caught.value.field == name


def test_several_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"top_p cannot be 3.* no setting 'tempo'"):
        SamplingParams.model_validate({"tempo": 1, "top_p": 3})


@pytest.mark.parametrize(
    ("settings_class", "contradiction", "field"),
    [
        (SamplingParams, {"n": 2, "temperature": 0.0}, "n"),
        (SamplingParams, {"max_tokens": 0}, "max_tokens"),
        (EngineConfig, {"draft": "none", "num_steps": 3}, "num_steps"),
        (EngineConfig, {"draft": "none", "topk": 1}, "topk"),
        (EngineConfig, {"draft": "none", "num_draft_tokens": 4}, "num_draft_tokens"),
        (EngineConfig, {"draft": "none", "draft_model": "head"}, "draft_model"),
        (EngineConfig, {"draft": "none", "synthetic_acceptance": 3.0}, "synthetic_acceptance"),
        (EngineConfig, {"draft": "ngram", "draft_model": "head"}, "draft_model"),
        (EngineConfig, {"draft": "mtp", "draft_model": "head"}, "draft_model"),
        (
            EngineConfig,
            {"draft": "mtp", "num_steps": 3, "topk": 1, "num_draft_tokens": 5},
            "num_draft_tokens",
        ),
        (
            EngineConfig,
            {"draft": "mtp", "num_steps": 2, "topk": 2, "num_draft_tokens": 8},
            "num_draft_tokens",
        ),
    ],
)
def test_contradictions_are_refused(
    settings_class: type[Settings], contradiction: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: ") as caught:
        settings_class.model_validate(contradiction)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "agreeing",
    [
        {"draft": "mtp", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
        {"draft": "mtp", "num_steps": 2, "topk": 2, "num_draft_tokens": 7},
        {"draft": "mtp", "num_steps": 3, "num_draft_tokens": 16},
        {"draft": "eagle", "draft_model": "head"},
        {"draft": "auto", "draft_model": "head", "synthetic_acceptance": [0.9, 0.5]},
        {"draft": "suffix", "synthetic_acceptance": 3},
        {"adaptive": False},
    ],
)
def test_settings_that_agree_are_taken(agreeing: dict[str, Any]) -> None:
    config = EngineConfig.of(None, agreeing)
    assert {name: getattr(config, name) for name in agreeing} == agreeing


def test_of_puts_fields_over_a_configuration_and_checks_them_together() -> None:
    base = EngineConfig(draft="mtp", num_steps=3, seed=5)
    assert EngineConfig.of(base, {}) == base
    assert EngineConfig.of(None, {}) == EngineConfig()
    merged = EngineConfig.of(base, {"seed": 6, "topk": 2})
    assert (merged.draft, merged.num_steps, merged.topk, merged.seed) == ("mtp", 3, 2, 6)
    assert base.seed == 5
    with pytest.raises(ConfigError, match="num_steps"):
        EngineConfig.of(base, {"draft": "none"})
    with pytest.raises(ConfigError, match="no setting 'sed'; did you mean"):
        EngineConfig.of(base, {"sed": 1})
    with pytest.raises(ConfigError, match="give an EngineConfig or None"):
        EngineConfig.of({"seed": 1}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [SamplingParams(stop=["a"], logit_bias={1: 2.0}), EngineConfig(seed=3)])
def test_settings_are_frozen_and_travel(made: Settings) -> None:
    with pytest.raises(ConfigError, match=r"seed cannot be changed"):
        made.seed = 4  # type: ignore[attr-defined]
    assert made == copy.deepcopy(made) == pickle.loads(pickle.dumps(made))


def test_a_list_given_is_not_shared() -> None:
    stops = ["a"]
    params = SamplingParams(stop=stops)
    stops.append("")
    assert params.stop == ["a"]


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_schema_is_neither_shared_nor_walked_through() -> None:
    given = {"enum": ({"a": np.int64(3)}, {4})}
    structure = Structure(json_schema=given)
    given["enum"] = ()
    assert structure.json_schema == {"enum": [{"a": 3}, [4]]} and structure.checked() == structure
    assert Structure(json_schema=nested(300)).source.count("properties") == 300


def test_endless_nesting_is_refused_by_name() -> None:
    itself: list[Any] = []
    itself.append(itself)
    around: dict[str, Any] = {}
    around["a"] = around
    for field in ("stop", "stop_token_ids", "max_tokens"):
        with pytest.raises(ConfigError, match=f"{field} cannot be ") as caught:
            SamplingParams(**{field: itself})
        assert caught.value.field == field and len(str(caught.value)) < 300
    for schema in (around, {"a": itself}, nested(100_000), {"a": object()}):
        with pytest.raises(ConfigError, match="not JSON") as caught:
            Structure(json_schema=schema)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=2)), max_size=2),
    st.dictionaries(st.integers(), st.floats(), max_size=2),
)


def refusal(settings_class: type[Settings], fields: dict[str, Any]) -> ConfigError | None:
    try:
        settings_class.model_validate(fields)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("settings_class", [SamplingParams, EngineConfig])
@given(st.data())
@settings(deadline=None, max_examples=100)
def test_no_mistake_shows_pydantic(settings_class: type[Settings], data: st.DataObject) -> None:
    names = st.one_of(st.sampled_from(list(settings_class.model_fields)), st.text(min_size=1, max_size=5))
    error = refusal(settings_class, data.draw(st.dictionaries(names, VALUES, max_size=4)))
    if error is not None:
        assert error.field and (error.field in str(error) or repr(error.field) in str(error))
        assert error.__suppress_context__ or error.__context__ is None
        assert "pydantic" not in str(error)


@pytest.mark.parametrize("wrong", [5, "temperature=1", [1], None])
def test_something_else_than_settings_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="takes settings by name"):
        SamplingParams.model_validate(wrong)


@pytest.mark.parametrize("settings_class", [SamplingParams, EngineConfig])
@pytest.mark.parametrize("garbage", [(3,), ({"seed": 1},), (None,), (1, 2)])
def test_positional_settings_are_refused_with_an_example(
    settings_class: type[Settings], garbage: tuple[object, ...]
) -> None:
    with pytest.raises(ConfigError, match=rf"by name; write {settings_class.__name__}\(\w+=…\)"):
        settings_class(*garbage)
