import argparse
from pathlib import Path

import pytest

from specdec.config.base import Settings
from specdec.config.engine import EngineConfig
from specdec.config.options import add_settings, at_least, listed, settings_from
from specdec.config.parser import as_typed
from specdec.config.sampling import SamplingParams
from specdec.config.structured import Structure
from specdec.config.thinking import ThinkingSpan
from specdec.errors import ConfigError
from specdec.ray.settings import RayConfig
from specdec.server.settings import ServerConfig

TOLD = [EngineConfig, SamplingParams, Structure, ThinkingSpan, ServerConfig, RayConfig]
SETTINGS = Path(__file__).parents[2] / "docs" / "settings.md"


def parse(settings: type[Settings], *argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings(parser, settings, title="settings")
    return settings_from(parser.parse_args(argv), settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (ServerConfig, "api_key"),
        (ServerConfig, "served_model_name"),
        (SamplingParams, "bad_words"),
        (SamplingParams, "stop"),
    ],
)
def test_a_list_of_texts_takes_numbers_as_texts(settings: type[Settings], name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    assert getattr(parse(settings, option, "123", option, "4.5"), name) == ["123", "4.5"]


@pytest.mark.parametrize("settings", [EngineConfig, SamplingParams])
def test_options_left_out_leave_the_defaults(settings: type[Settings]) -> None:
    assert parse(settings) == settings()
    assert parse(settings).model_fields_set == set()


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["--device", "cpu", "--dtype", "bfloat16"], {"device": "cpu", "dtype": "bfloat16"}),
        (["--kv-dtype", "fp8"], {"kv_dtype": "fp8"}),
        (["--memory-bytes", "2GiB"], {"memory_bytes": 2 << 30}),
        (["--memory-bytes", "4096"], {"memory_bytes": 4096}),
        (["--no-adaptive", "--prefix-cache"], {"adaptive": False, "prefix_cache": True}),
        (["--draft", "ngram", "--num-steps", "3"], {"draft": "ngram", "num_steps": 3}),
        (["--draft", "mtp", "--synthetic-acceptance", "2.5"], {"draft": "mtp", "synthetic_acceptance": 2.5}),
        (
            ["--draft", "mtp", "--synthetic-acceptance", "[0.9, 0.5]"],
            {"draft": "mtp", "synthetic_acceptance": [0.9, 0.5]},
        ),
        (
            ["--draft", "mtp", "--synthetic-acceptance", ".9,1."],
            {"draft": "mtp", "synthetic_acceptance": [0.9, 1]},
        ),
        (["--draft", "eagle", "--draft-model", "123"], {"draft": "eagle", "draft_model": "123"}),
        (["--seed", "None", "--max-model-len", "none", "--draft-model", "None"], {}),
    ],
)
def test_options_make_the_engine_config_that_python_makes(argv: list[str], fields: dict[str, object]) -> None:
    assert parse(EngineConfig, *argv) == EngineConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["--temperature", "0", "--max-tokens", "7"], {"temperature": 0.0, "max_tokens": 7}),
        (["--stop", "a", "--stop", "12"], {"stop": ["a", "12"]}),
        (["--stop-token-ids", "3", "--stop-token-ids", "4"], {"stop_token_ids": [3, 4]}),
        (["--ignore-eos", "--seed", "-5"], {"ignore_eos": True, "seed": -5}),
        (["--temperature", ".5", "--top-p", "1.", "--min-p", "1e-2"], {"temperature": 0.5, "min_p": 0.01}),
        (["--stop", "None", "--stop-token-ids", "none", "--seed", "NONE"], {"stop": ["None"]}),
    ],
)
def test_options_make_the_params_that_python_makes(argv: list[str], fields: dict[str, object]) -> None:
    assert parse(SamplingParams, *argv) == SamplingParams.model_validate(fields)


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--num-steps", "many"], "num_steps"),
        (["--max-running", "1.5"], "max_running"),
        (["--max-running", "1."], "max_running"),
        (["--max-running", "none"], "max_running"),
        (["--seed", "9" * 5000], "seed"),
        (["--seed", "[" * 5000], "seed"),
        (["--synthetic-acceptance", ".5,"], "synthetic_acceptance"),
        (["--synthetic-acceptance", "NaN"], "synthetic_acceptance"),
        (["--device", "tpu"], "device"),
        (["--draft", "none", "--topk", "2"], "topk"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_the_settings(argv: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(EngineConfig, *argv)
    assert caught.value.field == field


def test_every_expressible_field_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, EngineConfig, title="engine")
    text = parser.format_help()
    for name in EngineConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize("settings", [EngineConfig, SamplingParams])
def test_help_explains_a_setting_and_list_syntax(
    settings: type[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "600")
    parser = argparse.ArgumentParser()
    add_settings(parser, settings, title="settings")
    text = parser.format_help()
    for name, field in settings.model_fields.items():
        if name not in ("logit_bias", "structured_outputs", "thinking"):
            assert field.title and f"{field.title}: {field.description}" in text, name
    assert ("written 0.9,0.5" if settings is EngineConfig else "may be repeated") in text


@pytest.mark.parametrize("text", ["0", "x", "1,", "1,x"])
def test_listed_counts_refuse_invalid_counts(text: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--batch", type=listed(at_least(1)))
    assert parser.parse_args(["--batch", "4, 16"]).batch == [4, 16]
    with pytest.raises(argparse.ArgumentError) as caught:
        parser.parse_args(["--batch", text])
    assert "read" not in str(caught.value)


def test_advice_is_spelt_as_options_but_the_query_of_a_url_is_left_alone() -> None:
    assert as_typed("give draft='auto' or port=PORT") == "give --draft auto or --port PORT"
    for address in ("http://a:1?bootstrap=PORT", "http://a:1?x=1&bootstrap=PORT"):
        assert as_typed(f"give {address}") == f"give {address}"
