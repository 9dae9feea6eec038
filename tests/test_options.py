import argparse

import pytest

from specdec.config import EngineConfig, SamplingParams, Settings
from specdec.errors import ConfigError
from specdec.options import add_settings, at_least, listed, settings_from


def parse(settings: type[Settings], *argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings(parser, settings, title="settings")
    return settings_from(parser.parse_args(argv), settings)


@pytest.mark.parametrize("settings", [EngineConfig, SamplingParams])
def test_options_left_out_leave_the_defaults(settings: type[Settings]) -> None:
    assert parse(settings) == settings()
    assert parse(settings).model_fields_set == set()


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["--device", "cpu", "--dtype", "bfloat16"], {"device": "cpu", "dtype": "bfloat16"}),
        (["--memory-bytes", "2GiB"], {"memory_bytes": 2 << 30}),
        (["--memory-bytes", "4096"], {"memory_bytes": 4096}),
        (["--no-adaptive", "--prefix-cache"], {"adaptive": False, "prefix_cache": True}),
        (["--draft", "ngram", "--num-steps", "3"], {"draft": "ngram", "num_steps": 3}),
        (["--draft", "mtp", "--synthetic-acceptance", "2.5"], {"draft": "mtp", "synthetic_acceptance": 2.5}),
        (
            ["--draft", "mtp", "--synthetic-acceptance", "[0.9, 0.5]"],
            {"draft": "mtp", "synthetic_acceptance": [0.9, 0.5]},
        ),
        (["--draft", "eagle", "--draft-model", "123"], {"draft": "eagle", "draft_model": "123"}),
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
    ],
)
def test_options_make_the_params_that_python_makes(argv: list[str], fields: dict[str, object]) -> None:
    assert parse(SamplingParams, *argv) == SamplingParams.model_validate(fields)


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--num-steps", "many"], "num_steps"),
        (["--max-running", "1.5"], "max_running"),
        (["--synthetic-acceptance", "NaN"], "synthetic_acceptance"),
        (["--device", "tpu"], "device"),
        (["--draft", "none", "--topk", "2"], "topk"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_the_settings(argv: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(EngineConfig, *argv)
    assert caught.value.field == field


def test_every_field_that_a_command_line_can_say_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, EngineConfig, title="engine")
    text = parser.format_help()
    for name in EngineConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize("text", ["0", "x", "1,", "1,x"])
def test_listed_counts_refuse_what_is_no_count(text: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--batch", type=listed(at_least(1)))
    assert parser.parse_args(["--batch", "4, 16"]).batch == [4, 16]
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(["--batch", text])
