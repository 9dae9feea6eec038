"""Aliases for options of vLLM and SGLang."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from specdec.config.aliases import ALIASES, INSTEAD, SHORT
from specdec.config.base import Settings
from specdec.config.engine import EngineConfig
from specdec.config.options import add_settings, settings_from
from specdec.config.parser import Parser
from specdec.config.sampling import SamplingParams
from specdec.server.settings import ServerConfig

SETTINGS = Path(__file__).parents[2] / "docs" / "settings.md"
SPECULATIVE = '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}'
SAMPLES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "max_num_seqs": (["7"], {"max_running": 7}),
    "max_running_requests": (["7"], {"max_running": 7}),
    "max_num_batched_tokens": (["99"], {"chunk_tokens": 99}),
    "chunked_prefill_size": (["99"], {"chunk_tokens": 99}),
    "context_length": (["99"], {"max_model_len": 99}),
    "enable_prefix_caching": ([], {"prefix_cache": True}),
    "disable_radix_cache": ([], {"prefix_cache": False}),
    "enforce_eager": ([], {"graphs": False}),
    "disable_cuda_graph": ([], {"graphs": False}),
    "kv_cache_dtype": (["fp8_e4m3"], {"kv_dtype": "fp8"}),
    "quantization": (["none"], {"quantize": None}),
    "speculative_config": (
        [SPECULATIVE],
        {"draft": "eagle", "draft_model": "HEAD", "num_steps": 3, "topk": 1},
    ),
    "speculative_algorithm": (["NEXTN"], {"draft": "mtp"}),
    "speculative_draft_model_path": (["HEAD"], {"draft_model": "HEAD"}),
    "speculative_num_steps": (["3"], {"num_steps": 3}),
    "speculative_eagle_topk": (["2"], {"topk": 2}),
    "speculative_num_draft_tokens": (["8"], {"num_draft_tokens": 8}),
    "tensor_parallel_size": (["2"], {"tp": 2}),
    "tp_size": (["2"], {"tp": 2}),
    "random_seed": (["5"], {"seed": 5}),
    "max_new_tokens": (["9"], {"max_tokens": 9}),
    "n_predict": (["9"], {"max_tokens": 9}),
    "num_predict": (["9"], {"max_tokens": 9}),
    "num_ctx": (["99"], {"max_model_len": 99}),
    "temp": (["0.5"], {"temperature": 0.5}),
    "parallel": (["7"], {"max_running": 7}),
    "model_draft": (["HEAD"], {"draft_model": "HEAD"}),
    "watchdog_timeout": (["60"], {"step_timeout": 60}),
    "disaggregation_mode": (["decode"], {"role": "decode"}),
    "disaggregation_bootstrap_port": (["5601"], {"reach_port": 5601}),
}
"""The value of each alias, and the equivalent settings."""


def parser(given: tuple[type[Settings], ...] = (ServerConfig, EngineConfig)) -> Parser:
    made = Parser(prog="specdec serve")
    for settings in given:
        add_settings(made, settings, title="settings")
    return made


def request_parser() -> Parser:
    made = Parser(prog="specdec generate")
    add_settings(made, SamplingParams, title="sampling")
    return made


def read(*argv: str) -> dict[str, Any]:
    args = parser().parse_args(argv)
    engine, server = settings_from(args, EngineConfig), settings_from(args, ServerConfig)
    return engine.model_dump(exclude_unset=True) | server.model_dump(exclude_unset=True)


def refused(
    capsys: pytest.CaptureFixture[str],
    *argv: str,
    settings: tuple[type[Settings], ...] = (ServerConfig, EngineConfig),
) -> str:
    with pytest.raises(SystemExit) as ended:
        parser(settings).parse_args(argv)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_every_alias_sets_what_it_means() -> None:
    assert SAMPLES.keys() == ALIASES.keys()
    for name, (values, meaning) in SAMPLES.items():
        for option in (f"--{name.replace('_', '-')}", *SHORT.get(name, ())):
            if meaning.keys() <= EngineConfig.model_fields.keys() | ServerConfig.model_fields.keys():
                assert read(option, *values) == meaning, name
            else:
                params = settings_from(request_parser().parse_args([option, *values]), SamplingParams)
                assert params.model_dump(exclude_unset=True) == meaning, name
        assert {*ALIASES[name].fields} == meaning.keys()


def test_no_alias_has_the_name_of_a_setting() -> None:
    own = EngineConfig.model_fields.keys() | ServerConfig.model_fields.keys()
    others = [*ALIASES, *(name for names in INSTEAD.values() for name in names)]
    assert not own & {*others}
    assert len(others) == len({*others})


def test_a_list_takes_several_values_and_number_aliases_are_accepted() -> None:
    given = read("--api-key", "a", "b", "--port", "1", "--api-key", "c", "--dtype", "half")
    assert given == {"api_key": ["a", "b", "c"], "port": 1, "dtype": "float16"}
    assert read("--dtype", "float") == {"dtype": "float32"}


def test_a_switch_may_be_reversed() -> None:
    assert read("--no-enable-prefix-caching") == {"prefix_cache": False}
    assert read("--no-disable-radix-cache") == {"prefix_cache": True}
    assert read("--no-enforce-eager") == {"graphs": None}


@pytest.mark.parametrize(
    "argv",
    [
        ("--max-running", "8", "--max-num-seqs", "8"),
        ("--max-num-seqs", "8", "--max-running=8"),
        ("--max-num-seqs", "8", "--max-running-requests", "8"),
        ("--no-prefix-cache", "--disable-radix-cache"),
        ("--speculative-config", SPECULATIVE, "--topk", "1"),
        ("--draft", "mtp", "--speculative-config", SPECULATIVE),
    ],
)
def test_a_setting_by_two_names_is_refused(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, *argv)
    first, second = [word.partition("=")[0] for word in argv if word.startswith("--")]
    assert f"{first} and {second} both set" in line
    assert read("--max-num-seqs", "7", "--max-num-seqs", "8") == {"max_running": 8}, "the last one counts"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "it is not JSON"),
        ("[]", "it is not a JSON object"),
        ('{"method": "medusa"}', "'medusa' is none of"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens cannot be 0"),
        ('{"method": "ngram", "prompt_lookup_max": 4}', "'prompt_lookup_max' is not a supported key"),
    ],
)
def test_a_speculative_config_that_means_nothing_here_is_refused(
    given: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "--speculative-config", given)


def test_options_of_other_engines_get_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    known = {own.__name__: own for own in (EngineConfig, SamplingParams, ServerConfig)}
    for settings, names in INSTEAD.items():
        for name, advice in names.items():
            for option in (f"--{name.replace('_', '-')}", *SHORT.get(name, ())):
                said = refused(capsys, option, "1", settings=(known[settings],))
                assert f"{option} is not supported: {advice}" in said
    text = " ".join(advice for names in INSTEAD.values() for advice in names.values())
    options = {word.strip(",.;")[2:].replace("-", "_") for word in text.split() if word.startswith("--")}
    of_commands = {"prompt_file", "system"}
    assert options <= {name for own in known.values() for name in own.model_fields} | of_commands


def test_short_help_leaves_them_out_and_long_help_names_them() -> None:
    made = parser()
    short, long = made.format_help(), made.format_all()
    assert isinstance(made, argparse.ArgumentParser)
    assert "--max-num-seqs" not in short and "--max-num-seqs" in long
    assert "--gpu-memory-utilization" not in long
