"""Settings in a YAML file: by option name, overridden by the command line, refused by line."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import _parser, main
from specdec.config.engine import EngineConfig
from specdec.config.file import fill_in
from specdec.config.options import settings_from
from specdec.config.sampling import SamplingParams
from specdec.errors import ConfigError
from specdec.server.settings import ServerConfig

WHOLE = """\
# what a server may be told
model: tiny
port: 8001
served-model-name: small
api_key: [one, two]
request-timeout: 60
ssl_keyfile: null
max-num-seqs: 7
memory-bytes: 2GiB
quantize: none
no-such-comment: 1
disable-radix-cache: true
speculative-config: {method: mtp, num_speculative_tokens: 3}
"""
SERVE = (ServerConfig, EngineConfig)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "specdec.yaml"


def serve(path: Path, *argv: str) -> argparse.Namespace:
    args = _parser().parse_args(["serve", *argv, "--config", str(path)])
    fill_in(args, *SERVE, several=True)
    return args


def given(args: argparse.Namespace) -> dict[str, Any]:
    found = [settings_from(args, settings).model_dump(exclude_unset=True) for settings in SERVE]
    return {"model": args.model, **found[0], **found[1]}


def test_a_file_sets_options_and_the_command_line_overrides_it(path: Path) -> None:
    path.write_text(WHOLE.replace("no-such-comment: 1\n", ""))
    said = {
        **{"model": ["tiny"], "port": 8001, "served_model_name": ["small"], "api_key": ["one", "two"]},
        **{"request_timeout": 60, "ssl_keyfile": None, "max_running": 7, "memory_bytes": 2 << 30},
        **{"quantize": None, "prefix_cache": False, "draft": "mtp", "num_steps": 3, "topk": 1},
    }
    assert given(serve(path)) == said
    changed = given(serve(path, "FOLDER", "--port", "1", "--max-running", "9", "--prefix-cache"))
    assert changed == said | {"model": ["FOLDER"], "port": 1, "max_running": 9, "prefix_cache": True}
    path.write_text("model: [tiny, FOLDER]")
    assert given(serve(path)) == {"model": ["tiny", "FOLDER"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (WHOLE, "line 11: no-such-comment is not a setting of this command"),
        ("max-runing: 4", "line 1: max-runing is not a setting of this command; did you mean max-running"),
        ("\nmax-running: many", "line 2: max-running cannot be 'many'; give an integer"),
        ("max-num-seqs: 0", "line 1: max-num-seqs cannot be 0"),
        ("max-num-seqs: true", "line 1: max-num-seqs cannot be True"),
        ("enable-prefix-caching: perhaps", "line 1: enable-prefix-caching cannot be 'perhaps'"),
        ("port: '8000'", "line 1: port cannot be '8000'"),
        ("draft: none\ntopk: 2", "line 2: topk: it has no meaning"),
        ("port: 1\nport: 2", "line 2: port sets port, as port of line 1 does"),
        (
            "max-running: 1\nmax_num_seqs: 1",
            "line 2: max_num_seqs sets max_running, as max-running of line 1",
        ),
        (
            "gpu-memory-utilization: 0.9",
            "line 1: gpu-memory-utilization is not a setting here: give --memory-bytes",
        ),
        ("speculative-config: {method: x}", "line 1: speculative_config: the method 'x'"),
        (
            "quantization: gptq",
            "line 1: quantization: gptq checkpoints are detected",
        ),
        ("reasoning-parser: qwen4", '"seed_oss" or "none" (did you mean qwen3?).'),
        ("model: [a, 2]", "line 1: model cannot be ['a', 2]"),
        ("no: 1", "line 1: False is not an option's name"),
        ("port: !!python/object:os.system {}", "line 1: it is not YAML: could not determine a constructor"),
        ("port: [1", "it is not YAML"),
        ("- port", "it is not a mapping"),
        ("port: \x00", "cannot be read"),
        (b"port: \xff", "cannot be read"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_invalid_entries_are_refused_by_line(path: Path, text: str | bytes | None, says: str) -> None:
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        serve(path, "tiny")
    assert says in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_must_be_named_somewhere(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("")
    for argv in (["serve"], ["info", "--config", str(path)]):
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert "MODEL is missing" in said and (str(path) in said) == (str(path) in argv)


def test_generate_takes_sampling_and_engine(path: Path) -> None:
    path.write_text("model: tiny\ntemperature: 0\nstop: x\nseed: 3\nlogit_bias: {5: 1.5}\ndraft: ngram\n")
    args = _parser().parse_args(["generate", "--prompt", "a", "--config", str(path), "--seed", "4"])
    fill_in(args, SamplingParams, EngineConfig)
    assert settings_from(args, SamplingParams).model_dump(exclude_unset=True) == {
        **{"temperature": 0, "stop": "x", "seed": 4, "logit_bias": {5: 1.5}},
    }
    assert settings_from(args, EngineConfig).draft == "ngram"
