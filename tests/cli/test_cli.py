"""The command line: what goes to which stream, and the exit codes."""

import io
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec import EngineConfig, SamplingParams, SpecEngine, __version__
from specdec.cli import EXAMPLES, _parser, main
from specdec.draft.suffix import SuffixDrafter

ROOT = Path(__file__).parents[2]
GREEDY = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = "def f():"

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def text(hybrid: Path) -> str:
    with SpecEngine(hybrid) as engine:
        return engine.generate(PROMPT, PARAMS)[0].text


def test_generate_streams_the_engines_text(hybrid: Path, text: str, capsys: Capture) -> None:
    assert main(["generate", str(hybrid), "--prompt", PROMPT, *GREEDY]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{text}\n"
    assert "6 generated" in captured.err
    assert "TTFT" in captured.err


def test_generate_reads_a_prompt_from_a_file(
    hybrid: Path, text: str, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    assert main(["generate", str(hybrid), "--prompt-file", str(tmp_path / "prompt.txt"), *GREEDY]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_generate_reads_ids_from_standard_input(
    hybrid: Path, text: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SpecEngine(hybrid) as engine:
        assert engine.tokenizer
        ids = engine.tokenizer.encode(PROMPT)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(map(str, ids)).encode())))
    assert main(["generate", str(hybrid), "--prompt-ids", "-", *GREEDY]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_generate_prints_json_for_programs(hybrid: Path, text: str, capsys: Capture) -> None:
    assert main(["generate", str(hybrid), "--prompt", PROMPT, "--json", *GREEDY]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["text"] == text
    assert len(printed["token_ids"]) == printed["stats"]["output_tokens"] == 6
    assert printed["stats"]["acceptance_length"] == 1.0


def test_generate_prints_every_choice(hybrid: Path, capsys: Capture) -> None:
    argv = [
        "generate",
        str(hybrid),
        "--prompt",
        PROMPT,
        "--n",
        "3",
        "--seed",
        "7",
        "--max-tokens",
        "9",
        "--json",
    ]
    assert main(argv) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [choice["index"] for choice in printed] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in printed}) == 3


def test_generate_repeats_itself_with_a_seed(hybrid: Path, capsys: Capture) -> None:
    argv = ["generate", str(hybrid), "--prompt", PROMPT, "--max-tokens", "20", "--ignore-eos", "--seed"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*argv, seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "/no/such/folder", "--prompt", "x"], "/no/such/folder"),
        (["generate", "{hybrid}", "--prompt", ""], "prompt"),
        (["generate", "{hybrid}", "--prompt-ids", "1 two"], "--prompt-ids: 'two' is not a token id"),
        (["generate", "{hybrid}", "--prompt-ids", "1_0"], "--prompt-ids: '1_0'"),
        (["generate", "{hybrid}", "--prompt-ids", "-7"], "token id -7"),
        (["generate", "{hybrid}", "--prompt", "\ud800"], "valid Unicode"),
        (["generate", "{hybrid}", "--prompt-ids", "99999"], "99999"),
        (
            ["generate", "{hybrid}", "--prompt-file", "/no/such/file"],
            "/no/such/file cannot be read: No such file",
        ),
        (
            ["generate", "{hybrid}", "--prompt-file", "a" * 5000],
            "--prompt-file: " + "a" * 120 + "…" + "a" * 60 + " cannot be read: File name too long",
        ),
        (["generate", "a" * 5000, "--prompt", "x"], "is neither a folder nor a model that ships"),
        (["generate", "{hybrid}", "--prompt-file", "/"], "--prompt-file: / cannot be read: Is a directory"),
        (
            ["generate", "{hybrid}", "--prompt-file", "{hybrid}/model.safetensors"],
            "is not UTF-8 text from byte",
        ),
        (["generate", "{hybrid}", "--prompt", "x", "--temperature", "hot"], "--temperature cannot be "),
        (["generate", "{hybrid}", "--prompt", "x", "--draft", "none", "--topk", "2"], "topk"),
        (["generate", "{hybrid}", "--prompt", "x", "--memory-bytes", "1"], "--memory-bytes"),
        (["info", "/no/such/folder"], "/no/such/folder"),
        (["bench", "throughput", "--shape", "huge"], "'huge'"),
        (["bench", "throughput", "{hybrid}", "--peers", "nobody"], "'nobody'"),
        (["bench", "throughput", "{hybrid}", "--peers", "http://host:port"], "--peers: 'http://host:port'"),
        (["bench", "throughput", "{hybrid}", "--out", "/"], "--out: /"),
    ],
)
def test_mistake_is_one_line_and_code_2(argv: list[str], says: str, hybrid: Path, capsys: Capture) -> None:
    assert main([arg.format(hybrid=hybrid) for arg in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith("specdec: ")
    assert says in line
    for raw in ("Traceback", "Errno", "invalid literal", "codec", "Error("):
        assert raw not in captured.err


@pytest.mark.parametrize("command", [["generate"], ["info"], ["bench", "throughput"]])
def test_every_engine_setting_is_an_option(command: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help-all"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in EngineConfig.model_fields:
        assert f"--{name.replace('_', '-')} " in text or f"--{name.replace('_', '-')}," in text


def test_version_is_said(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"specdec {__version__}\n"


def test_package_runs_as_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "specdec", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"specdec {__version__}\n", "")


MODULES = """
import os, sys
import specdec.__main__
slow = {"torch", "transformers", "pydantic", "aiohttp", "numpy"}
os._exit = lambda code: print(code, *sorted(slow & set(sys.modules)))
sys.argv[0] = "specdec"
specdec.__main__._leave(specdec.__main__._run())
"""


@pytest.mark.parametrize(
    ("argv", "brings"),
    [
        (["--version"], "0"),
        (["--help"], "0"),
        (["bench", "--help"], "0"),
        (["genrate"], "2"),
        (["--num-steps"], "2"),
        (["serve", "--help"], "0 pydantic"),
        (["serve", "tiny", "--num-step", "4"], "2 pydantic"),
        (["generate", "tiny", "--prompt", "x", "--temperature", "hot"], "2 pydantic"),
        (["generate", "/no/such/folder", "--prompt", "x"], "2 pydantic"),
        (["serve", "/no/such/folder"], "2 pydantic"),
        (["chat", "/no/such/folder"], "2 pydantic"),
        (["info", "/no/such/folder"], "2 pydantic"),
        (["bench", "throughput", "/no/such/folder"], "2 pydantic"),
        (["top", "ftp://nonsense"], "2 aiohttp pydantic"),
        (["top", "http://127.0.0.1:9", "--once"], "2 aiohttp pydantic"),
    ],
)
def test_light_commands_import_no_slow_modules(argv: list[str], brings: str) -> None:
    ran = subprocess.run([sys.executable, "-c", MODULES, *argv], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == brings, ran.stderr


HEAVY = """
import sys
import specdec.__main__
sys.argv[0] = "specdec"
code = specdec.__main__._run()
print(code, *sorted({"torch._dynamo", "sympy", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize("argv", [["info", "tiny"], ["chat", "tiny", "hello", "--max-tokens", "2"]])
def test_neither_a_compiler_nor_transformers_is_imported_at_start_up(argv: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", HEAVY, *argv], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1].split() == ["0"], ran.stderr


COLLECTOR = """
import gc
from specdec import __main__, cli

def main(on_start):
    before = gc.isenabled()
    on_start()
    print(before, gc.isenabled(), gc.get_freeze_count() > 0)
    return 0

cli.main = main
__main__.main()
"""


def test_garbage_is_collected_from_the_beginning_of_a_command_and_not_among_imports() -> None:
    ran = subprocess.run([sys.executable, "-c", COLLECTOR], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "True", "True"], ran.stderr


def test_serving_and_benchmarks_do_not_import_transformers() -> None:
    script = (
        "import sys, specdec.server.run, specdec.setup.footprint\n"
        "import specdec.bench.acceptance.run, specdec.bench.throughput\n"
        "import tools.bench.prefix.engine, tools.bench.time_model\n"
        "from specdec import SpecEngine, SamplingParams, Structure\n"
        "with SpecEngine('tiny', memory_bytes='64MiB', max_model_len=256) as engine:\n"
        "    engine.generate('x', SamplingParams(max_tokens=2))\n"
        "print('transformers' in sys.modules, 'llguidance' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "False"], ran.stderr


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["serve", "tiny", "--num-step", "4"], "--num-steps"),
        (["serve", "tiny", "--max_model_len=9"], "--max-model-len"),
        (["serve", "tiny", "--prot", "1"], "--port"),
        (["generate", "tiny", "--prompt", "x", "--temprature", "1"], "--temperature"),
        (["bench", "serve", "http://x", "--concurency", "1"], "--concurrency"),
        (["generate", "--pormpt", "x"], "--prompt"),
        (["--verison"], "--version"),
        (["srve", "tiny"], "serve"),
        (["bench", "throughputs"], "throughput"),
    ],
)
def test_a_typo_gets_close_matches(argv: list[str], near: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert f"; did you mean {near}" in line and "? See specdec" in line and line.count("\n") == 1


def test_a_value_may_look_like_an_option_where_it_has_a_blank(capsys: Capture) -> None:
    assert main(["generate", "tiny", "--prompt", "--x=1 y", "--n", "0"]) == 2
    assert capsys.readouterr().err.startswith("specdec: --n cannot be 0; give ")


GRAPHS = "--graphs or --no-graphs"
NO_CUDA = "--device: 'cuda' was asked for, but torch finds no CUDA device; use --device cpu or install "
CUDA_IS_MISSING = [] if torch.cuda.is_available() else [(["--device", "cuda"], NO_CUDA)]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--graphs", "True"], f"{GRAPHS} takes no value such as 'True'; write {GRAPHS}, or leave it out"),
        (["--graphs=True"], f"{GRAPHS} takes no value such as 'True'; write {GRAPHS}, or leave it out"),
        (["--draft", "mpt"], "--draft cannot be 'mpt'; give auto, none, "),
        (
            ["--topk", "0", "--num-steps=0"],
            "--num-steps cannot be 0; give an integer of at least 1. --topk c",
        ),
        (["--max-model-len", "abc"], "--max-model-len cannot be 'abc'; give an integer of at least 2.\n"),
        *CUDA_IS_MISSING,
        (["--draft"], "--draft needs a value: --draft DRAFT, or --draft=DRAFT where it begins with -"),
        (["--quantization", "awq_marlin"], "quantization: awq_marlin checkpoints are "),
        (["--draft", "none", "--topk", "2"], "--topk: it has no meaning with "),
        (["--no-prefix-cache", "--prefix-alpha", "2"], "--prefix-alpha: it has no effect without "),
        (["--max-model-len", "999999999"], "--max-model-len is 999999999, but the model supports "),
    ],
)
def test_a_refusal_names_options_as_they_were_written(argv: list[str], says: str, capsys: Capture) -> None:
    try:
        code: object = main(["info", "tiny", *argv])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2 and said.startswith(f"specdec: {says}") and "EngineConfig" not in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "tiny"], "run is not a command of specdec: specdec chat MODEL talks"),
        (["models"], "models is not a command of specdec: `hf cache ls` lists"),
        (["bench", "xyzzy"], "xyzzy is not a command of specdec bench; known are throughput, acceptance, "),
        (["generate", "tiny", "--colour", "red"], "--colour cannot be 'red'; give auto, always or never"),
        (["info", "tiny", "-ngl", "9"], "-ngl is not supported: the whole model runs on one device"),
        (["chat", "tiny", "Hi", "there"], "specdec chat does not take 'there'; quote an argument"),
        (["generate", "tiny", "-p", "x", "y"], "-p and 'y' both give the prompt; give it once, in quotes if"),
        (["generate", "tiny", "x", "--prompt", "y"], "--prompt and 'x' both give the prompt; give it once"),
        (["chat", "tiny", "x", "--message=y"], "--message and 'x' both give the message; give it once"),
        (["generate", "tiny", "x", "-n"], "-n needs a value: -n PREDICT"),
        (
            ["generate", "tiny", "-f", "x.txt"],
            "-f is not supported: give specdec generate --prompt-file",
        ),
        (["chat", "tiny", "-sys", "x"], "-sys is not supported: give specdec chat --system"),
        (["generate", "tiny", "-cnv"], "-cnv is not supported: specdec chat MODEL talks"),
        (["serve", "tiny", "-b", "512"], "-b is not supported: give --chunk-tokens"),
        (
            ["serve", "tiny", "--num-gpu", "1"],
            "--num-gpu is not supported: the whole model runs on",
        ),
        (["stop", "tiny"], "stop is not a command of specdec: Ctrl-C ends"),
        (["help"], "help is not a command of specdec: specdec --help lists"),
        (["serve", "tiny", "-n", "16"], "specdec serve does not take '-n'; see"),
        (["chat", "tiny", "-c", "512"], "-c is not supported: give --max-model-len"),
        (["chat", "-m", "tiny"], "-m is not supported: name the model without an option"),
        (["serve", "tiny", "-t", "4"], "-t is not supported: set OMP_NUM_THREADS"),
        (["serve", "tiny", "--dp-size", "2"], "--dp-size is not supported: a server has one device"),
        (["generate", "tiny", "-mg", "0"], "specdec generate does not take '-mg'"),
        (["generate", "tiny", "-ctk", "q8_0"], "specdec generate does not take '-ctk'"),
        (["generate", "tiny", "-nkvo", "x"], "specdec generate does not take '-nkvo'"),
        (["generate", "tiny", "-n", "3", "--max-tokens", "4"], "-n and --max-tokens both set max_tokens"),
        (
            ["serve", "tiny", "--gpu-memory-utilization", "0.9"],
            "--gpu-memory-utilization is not supported: ",
        ),
        (["pull", "tiny"], "pull is not a command of specdec: a model named OWNER/NAME is downloaded"),
    ],
)
def test_a_command_of_another_program_gets_a_hint(argv: list[str], says: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"specdec: {says}") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "says"),
    [
        *((name, f"{name} is not a folder; did you mean tiny?") for name in ("tyny", "Tiny", "TINY")),
        *(
            (name, f"specdec: {name} looks like a model of Ollama's library; give the path that `ollama show")
            for name in ("qwen3:0.6b", "ollama.com/library/x", "https://ollama.com/library/x:1b")
        ),
        *(
            (name, f"specdec: {name} is not the URL of a Hugging Face model; give the path of a folder")
            for name in ("https://example.org/owner/name", "s3://owner/name", "hf.co/name")
        ),
        ("qwen3", "specdec: qwen3 is neither a folder nor a model that ships with specdec (tiny); a model "),
        ("qwen3", "the Hugging Face hub is named OWNER/NAME, as in "),
        ("./qwen3", "specdec: ./qwen3 is not a folder; give the path"),
        ("", "model: '' is not a path; give a folder"),
        ("model.gguf", "model.gguf does not exist"),
    ],
)
@pytest.mark.parametrize("command", [["info"], ["chat"], ["generate", "-p", "x"], ["bench", "throughput"]])
def test_a_model_name_of_another_program_gets_a_hint(
    command: list[str], model: str, says: str, capsys: Capture
) -> None:
    assert main([*command, model]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["-n", "4", "--temp", "0", PROMPT],
        ["-n4", PROMPT, "--temp=0"],
        [PROMPT, "--n-predict", "4", "--temperature", "0"],
        ["-p", PROMPT, "--max-new-tokens", "4", "--temp", "0"],
        ["-s", "7", PROMPT, "--num-predict", "4", "--temp", "0"],
    ],
)
def test_generate_accepts_llama_cpps_options_and_a_prompt_after_the_model(
    argv: list[str], hybrid: Path, capsys: Capture
) -> None:
    told = ["--prompt", PROMPT, "--max-tokens", "4", "--temperature", "0"]
    assert main(["generate", str(hybrid), *told, "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)["token_ids"]
    assert main(["generate", str(hybrid), *argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == wanted and len(wanted) == 4


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "the prompt is missing: give it after MODEL in quotes, or use"),
        (["--prompt-ids", "1", "x"], "--prompt and --prompt-ids both give a prompt"),
        (["-p", "x", "--prompt-file", "f"], "--prompt and --prompt-file both give a prompt"),
    ],
)
def test_a_prompt_is_given_once(argv: list[str], says: str, capsys: Capture) -> None:
    assert main(["generate", "tiny", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"specdec: {says}")


@pytest.mark.parametrize("argv", [["-n", "x"], ["-n", "-1"]])
def test_a_refusal_names_a_short_option_as_it_was_written(argv: list[str], capsys: Capture) -> None:
    assert main(["generate", "tiny", "hi", *argv]) == 2
    assert capsys.readouterr().err.startswith("specdec: -n cannot be ")


@pytest.mark.parametrize(
    ("argv", "switch"), [(["--json", "false"], "--json"), (["--ignore-eos", "Off"], "--ignore-eos")]
)
def test_a_value_after_a_switch_is_no_prompt(argv: list[str], switch: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "tiny", *argv])
    assert f"{switch}" in (said := capsys.readouterr().err) and "takes no value" in said


@pytest.mark.parametrize("option", ["--xyzzy", "--quux", "--reload"])
def test_an_error_without_close_matches_has_no_hint(option: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "tiny", option])
    assert capsys.readouterr().err == (
        f"specdec: {option} is not an option of specdec serve; see specdec serve --help\n"
    )


@pytest.mark.parametrize(
    "argv",
    [
        *(["bench", "throughput", "tiny", "tiny"], ["bench", "throughput", "-x"], ["info", "tiny", "tiny"]),
        ["serve", "--port", "1", "tiny", "--served-model-name", "a", "b", "--port", "2", "c"],
    ],
)
def test_an_extra_argument_is_refused_by_its_command(argv: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    command = " ".join(["specdec", *argv[: 2 if argv[0] == "bench" else 1]])
    line = f"specdec: {command} does not take '{argv[-1]}'; see {command} --help\n"
    assert ended.value.code == 2 and capsys.readouterr().err == line


@pytest.mark.parametrize("command", ["serve", "generate", "info"])
def test_help_fits_a_screen(command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main([command, option])
        assert ended.value.code == 0
        shown[option] = capsys.readouterr().out
    lines = shown["--help"].splitlines()
    assert 24 <= len(lines) <= {"generate": 50}.get(command, 42) and max(map(len, lines)) <= 80
    named = {option: set(re.findall(r"^  (--[\w-]+)", text, re.M)) for option, text in shown.items()}
    assert named["--help"] < named["--help-all"] and "--help-all" in named["--help"]


def test_names_in_an_error_do_not_command_the_terminal(capsys: Capture) -> None:
    assert main(["info", "/no/\x1b[31m\x07red\x9b2J\n"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("specdec: /no/\ufffd[31m\ufffdred\ufffd2J is not a folder")
    assert line.count("\n") == 1


def test_a_bad_model_is_reported_before_a_busy_port(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert main(["serve", "/no/such/folder", "--port", str(busy.getsockname()[1])]) == 2
    assert "/no/such/folder is not a folder" in capsys.readouterr().err


def test_verbose_shows_one_setting_a_line(hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert main(["info", str(hybrid), "--max-running", "7"]) == 0
    lines = next(r.getMessage() for r in caplog.records if r.name == "specdec.setup.resolve").splitlines()
    assert lines[0] == "settings:" and "  max_running: 7" in lines and "  drafters: suffix" in lines
    assert max(map(len, lines)) < 250


COMMANDS = ("generate", "info", "bench", "serve", "demo")
BENCHES = ("throughput", "acceptance", "serve")


@pytest.mark.parametrize("command", [*map(str.split, COMMANDS), *(["bench", name] for name in BENCHES)])
def test_every_command_takes_verbose(command: list[str], capsys: Capture) -> None:
    for argv in (["-v", *command], [*command, "--verbose"], [*command[:1], "-v", *command[1:]]):
        with pytest.raises(SystemExit) as left:
            main([*argv, "--help"])
        assert left.value.code == 0
        assert capsys.readouterr().out.count("-v, --verbose") == 1


@pytest.mark.parametrize("before", [[], ["-v"]])
@pytest.mark.parametrize("after", [[], ["-v"], ["--verbose"]])
def test_verbose_works_before_and_after_a_command(
    before: list[str], after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **settings: levels.append(settings["level"]))
    for command, *rest in (["info", "/nowhere"], ["bench", "throughput", "--shape", "nowhere"]):
        assert main([*before, command, *after, *rest]) == main([*before, command, *rest, *after]) == 2
    assert levels == [logging.INFO if before or after else logging.WARNING] * 4


def test_info_says_what_fits(hybrid: Path, capsys: Capture) -> None:
    argv = ["info", str(hybrid), "--memory-bytes", "4MiB", "--length", "16,512"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "3 gated delta net" in text and " EAGLE " not in text and "in 4 bits" not in text
    assert main([*argv, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["arena_bytes"] == 4 << 20
    assert f"{described['sequences']['512 tokens']} of 512 tokens" in text.replace(",", "")


def test_info_has_words_for_every_figure(capsys: Capture) -> None:
    for argv in (["--draft", "eagle"], ["--draft", "self-int4", "--dtype", "bfloat16"]):
        assert main(["info", "tiny", *argv]) == 0
        assert "multi-token head    " in capsys.readouterr().out


def test_a_sweep_that_leaves_nothing_to_measure_is_refused(capsys: Capture) -> None:
    assert main(["bench", "acceptance", "tiny", "--draft", "mtp", "--shape", "4:4:200"]) == 2
    told = capsys.readouterr().err
    assert "nothing is left" in told and "from 2" in told


def test_demo_shows_the_model_that_ships(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SpecEngine] = []

    class Watched(SpecEngine):
        def close(self) -> None:
            opened.append(self)
            super().close()

    monkeypatch.setattr("specdec.cli.demo.SpecEngine", Watched)
    assert main(["demo"]) == 0
    captured = capsys.readouterr()
    # Rounds generate the same text, so nothing may be looked up from earlier ones.
    drafters = [drafter for own in opened for drafter in own.model.loop.speculation.drafters]
    indices = [own for own in drafters if isinstance(own, SuffixDrafter)]
    assert len(opened) == 2 and [index._outputs.num_tokens for index in indices] == [0]
    assert captured.out.count("class Parser:") >= 2 and captured.out.count("def ") > 4
    found = re.findall(r"([\d.]+) x as fast as .* in turn, ([\d.]+) to ([\d.]+)\)", captured.err)
    assert len(found) == 2 and all(float(least) <= float(mid) <= float(most) for mid, least, most in found)
    assert len(re.findall("(?:is expected to|would) give .* x the time of", captured.err)) == 2, "it says why"


@pytest.fixture
def endless(checkpoint: Callable[..., Path]) -> Path:
    """Make a model whose context is too long for texts to end during the test."""
    return checkpoint(max_position_embeddings=1 << 18)


def start(model: Path) -> "subprocess.Popen[bytes]":
    """Stream a long completion in a process, up to its first byte."""
    argv = ["generate", str(model), "--prompt", PROMPT, "--max-tokens", "200000"]
    argv += ["--ignore-eos", "--seed", "0"]
    running = subprocess.Popen(
        [sys.executable, "-m", "specdec", *argv],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    assert running.stdout.read(1)
    return running


def test_interrupt_ends_a_stream_with_its_figures_and_130(endless: Path) -> None:
    running = start(endless)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    said = errors.decode()
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert re.search(r"^\d+ prompt tokens, [1-9]\d* generated in \d+\.\d\d s: TTFT \d+ ms", said, re.M)


def test_reader_that_leaves_ends_a_stream_quietly(endless: Path) -> None:
    running = start(endless)
    assert running.stdout is not None
    running.stdout.close()
    assert running.stderr is not None
    errors = running.stderr.read()
    running.stderr.close()
    assert running.wait(60) == 141, errors.decode()
    assert b"Traceback" not in errors


@pytest.mark.parametrize(
    ("command", "usage"), [("chat", "MODEL [TEXT]"), ("generate", "MODEL [TEXT]"), ("info", "MODEL")]
)
def test_usage_has_the_text_that_may_follow_the_model(command: str, usage: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.splitlines()[0] == f"usage: specdec {command} [options] {usage}"


@pytest.mark.parametrize("command", EXAMPLES)
def test_each_command_shows_an_example_that_it_accepts(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    shown = " ".join(capsys.readouterr().out.split("example: specdec ")[1].split())
    assert shown == f"{command} {EXAMPLES[command]}".strip()
    assert callable(_parser().parse_args(shlex.split(shown)).command)
