import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.bench import gguf_model, llama_cpp, llama_server, throughput
from specdec.bench.agreement import SAME_BITS, SAME_MODEL, agreement, require_same_model
from specdec.bench.bandwidth import BandwidthProbe
from specdec.bench.gguf_model import FileType, write_gguf
from specdec.bench.llama_cpp import LlamaCppPeer, ServerSettings, find_program
from specdec.bench.peers import Sample, TransformersPeer
from specdec.bench.runner import EngineRunner
from specdec.cli import main
from specdec.errors import ConfigError, EngineError
from specdec.models.checkpoint import Checkpoint
from specdec.models.folder import find_folder
from tests.bench.suited import SUITED
from tests.conftest import HYBRID

PROMPTS = [[5, 6, 7, 100, 101, 102, 17, 18], [9, 9, 30, 31, 32, 33, 34, 35]]
NEW_TOKENS = 12
EXCUSED = 1e-3
"""Maximum gap between llama.cpp's token and the best in float32, relative to the largest logit."""
COMMAND = ["bench", "throughput", "tiny", "--peers", "llama.cpp", "--repeats", "2", "--warmup", "0", "--json"]
COMMAND += ["--batch", "1,2", "--prompt-tokens", "9", "--new-tokens", "8"]
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def _needs_both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gguf", "xllamacpp"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    # A program on PATH would replace the engine under test.
    monkeypatch.setattr(llama_cpp, "PROGRAM", "no-llama-server-of-this-name")


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gguf_model, "random_models", lambda: tmp_path / "cache")
    monkeypatch.setattr(throughput, "BandwidthProbe", lambda device: BandwidthProbe(device, 1 << 20))


def settings(folder: Path, path: Path, kind: FileType, **changes: Any) -> ServerSettings:
    write_gguf(Checkpoint(folder), path, kind)
    given = {"threads": 1, "slots": 2, "context": 512, "batch": 512, "cache": "f16", **changes}
    return ServerSettings(None, str(path), kind, **given)


def gaps(folder: Path, wanted: ServerSettings) -> torch.Tensor:
    with closing(LlamaCppPeer(wanted)) as peer:
        sample = peer.run(PROMPTS, NEW_TOKENS)
    assert sample.prefill_s > 0 and sample.token_s > 0 and sample.token_ids is not None
    oracle = TransformersPeer(folder, dtype=torch.float32, device=torch.device("cpu"))
    return oracle.judge(PROMPTS, sample.token_ids)


@pytest.mark.parametrize("model", ["tiny", "random", "qwen3"])
def test_llama_cpp_and_transformers_give_equal_texts(
    model: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folders = {"random": (HYBRID, SUITED), "qwen3": (QWEN3, {})}
    folder = find_folder("tiny") if model == "tiny" else checkpoint(folders[model][0], **folders[model][1])
    gap_BT = gaps(folder, settings(folder, tmp_path / "model.gguf", "F32", cache="f32"))
    assert gap_BT.shape == (2, 1 + NEW_TOKENS)
    assert gap_BT.max() <= EXCUSED


def test_heads_in_another_order_are_another_model(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "_head_orders", lambda network: {})
    folder = checkpoint(HYBRID, **SUITED)
    gap_BT = gaps(folder, settings(folder, tmp_path / "model.gguf", "F32", cache="f32"))
    assert gap_BT.max() > 10 * EXCUSED


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0"])
def test_the_shipped_model_survives_fewer_bits(kind: FileType, tmp_path: Path) -> None:
    gap_BT = gaps(folder := find_folder("tiny"), settings(folder, tmp_path / "model.gguf", kind))
    assert gap_BT.mean() < SAME_MODEL


@pytest.mark.parametrize(("own", "most"), [(0.0, SAME_MODEL), (0.4, 0.4 * SAME_BITS)])
def test_tokens_of_another_model_give_no_figure(own: float, most: float) -> None:
    ours = agreement(torch.full((2, 3), own))
    require_same_model("llama.cpp", agreement(torch.full((2, 3), 0.9 * most)), ours, "transformers")
    for gap in (1.1 * most, float("nan")):
        with pytest.raises(EngineError, match=r"^llama\.cpp: .* no figure"):
            require_same_model("llama.cpp", agreement(torch.full((2, 3), gap)), ours, "transformers")


def test_another_model_ends_the_benchmark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "_head_orders", lambda network: {})
    assert main([*COMMAND, "--draft", "none"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "llama.cpp: its tokens lie" in captured.err


def report_of(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[dict[str, Any], str]:
    assert main([*COMMAND, *more]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.mark.parametrize(
    ("more", "kind"), [([], "BF16"), (["--quantize", "int4"], "Q4_0"), (["--dtype", "float32"], "F32")]
)
def test_benchmark_runs_it_in_the_same_bits(
    more: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report, out = report_of(capsys, "--draft", "none", *more)
    said = report["contestants"]["llama.cpp"]
    assert (said["file_type"], said["threads"]) == (kind, torch.get_num_threads())
    assert said["features"] and said["build"].startswith("xllamacpp 20")
    for case in report["cases"]:
        assert set(case["figures"]) == {"specdec", "llama.cpp"}
        assert case["peers"]["llama.cpp"]["tokens"] == 9 * case["batch"]
        assert case["figures"]["llama.cpp"]["tokens_per_step"]["median"] == 1
    assert f"llama.cpp: {kind}" in out and "greedy tokens" in out


def written(folder: Path, kind: FileType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write `tiny` as a GGUF file, to be loaded without its tokenizer."""
    path = folder / "model.gguf"
    write_gguf(Checkpoint(find_folder("tiny")), path, kind)
    monkeypatch.setattr("specdec.models.gguf.folder.NONE", ("rwkv",))
    return path


def test_both_read_the_same_gguf_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are checked by the engine's own logits, computed in one pass."""
    path = written(tmp_path, "Q8_0", monkeypatch)
    at = COMMAND.index("tiny")
    assert main([*COMMAND[:at], str(path), *COMMAND[at + 1 :], "--dtype", "float32"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["oracle"] == "specdec, draft none"
    assert report["contestants"]["llama.cpp"]["file_type"].startswith("Q8_0")
    for case in report["cases"]:
        assert case["agreement"]["largest_gap"] < EXCUSED
        assert case["peers"]["llama.cpp"]["mean_gap"] < SAME_MODEL
        assert set(case["figures"]) == {"specdec", "specdec, draft none", "llama.cpp", "llama.cpp, draft-mtp"}


def test_wrong_tokens_of_a_gguf_file_show_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "F32", monkeypatch)
    run = EngineRunner.run

    def spoilt(self: EngineRunner, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        sample = run(self, prompts, new_tokens)
        assert sample.token_ids is not None
        return replace(sample, token_ids=tuple((own[0] ^ 1, *own[1:]) for own in sample.token_ids))

    monkeypatch.setattr(EngineRunner, "run", spoilt)
    command = ["bench", "throughput", str(path), "--batch", "1", "--prompt-tokens", "9", "--json"]
    assert main([*command, "--new-tokens", "8", "--dtype", "float32"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "differ from specdec, draft none, first in row 0" in captured.err


def test_its_own_drafts_run_where_this_engine_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = report_of(capsys, "--draft", "mtp", "--num-steps", "2")
    assert report["contestants"]["llama.cpp, draft-mtp"]["drafts"] == 2
    assert all("llama.cpp, draft-mtp" in case["peers"] for case in report["cases"])


def test_its_drafts_are_accepted_at_the_same_rates(capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = report_of(capsys, "--draft", "mtp", "--num-steps", "2", "--synthetic-acceptance", "1,1")
    for case in report["cases"]:
        assert case["figures"]["llama.cpp, draft-mtp"]["tokens_per_step"]["median"] > 2
        # Drafts accepted at given rates are not the model's text.
        assert set(case["peers"]) == {"llama.cpp"}


def test_features_match_the_processor() -> None:
    line = (
        "0.1 I system_info: n_threads = 1 (n_threads_batch = 1) / 2 | CPU : AVX2 = 1 | AMX = 0 | FMA = 1 | "
    )
    assert llama_cpp.features(f"before\n{line}\nafter = 1") == ["AVX2", "FMA"]
    assert llama_cpp.features("nothing") == []


def test_conditional_rates_become_cumulative_ones(hybrid: Path) -> None:
    assert llama_cpp.reached((0.5, 0.5), 3) == (0.5, 0.25, 0.0)
    assert llama_cpp.reached((), 3) == ()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--quantize", "fp8"], "this engine in fp8 on cpu"),
        (["--dtype", "float64"], "this engine in float64 on cpu"),
    ],
)
def test_unsupported_settings_are_refused(
    more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", "tiny", "--peers", "llama.cpp", *more]) == 2
    assert says in capsys.readouterr().err


def test_missing_packages_are_named_with_their_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        llama_cpp.importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else found(name)
    )
    assert main(["bench", "throughput", "tiny", "--peers", "llama.cpp"]) == 2
    said = capsys.readouterr().err
    assert "--peers llama.cpp: it needs xllamacpp" in said and "pip install 'specdec[bench]'" in said
    # A program replaces that package; nothing replaces the writer.
    assert find_program(Path(sys.executable)) == sys.executable
    monkeypatch.setattr(llama_cpp.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="it needs gguf and xllamacpp"):
        find_program(Path(sys.executable))


def test_a_program_is_checked_and_belongs_to_the_peer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "throughput", "tiny", "--llama-server", sys.executable]) == 2
    assert "it belongs to --peers llama.cpp" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--llama-server: .* is not an executable file") as caught:
        find_program(tmp_path / "absent")
    assert caught.value.field == "llama_server"


def test_a_program_that_ends_is_quoted(tmp_path: Path) -> None:
    program = script(tmp_path, "echo cannot read the model >&2; exit 3")
    with pytest.raises(EngineError, match=r"did not start with m\.gguf; it said: …cannot read the model"):
        LlamaCppPeer(ServerSettings(program, "m.gguf", "BF16", 1, 1, 256, 256, "f16"))


def script(folder: Path, line: str) -> str:
    path = folder / "llama-server"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that records its process id and arguments, and keeps running."""
    said = f"{tmp_path}/said"
    program = script(tmp_path, f'echo $$ "$@" > {said}.part\nmv {said}.part {said}\nexec sleep 600')
    wanted = {"program": program, "model": "m.gguf", "port": 9, "threads": 2, "slots": 4, "context": 1024}
    wanted |= {"batch": 512, "cache": "f16", "drafts": 3, "rates": [0.5, 0.25, 0.0]}
    supervisor = subprocess.Popen(
        [sys.executable, "-P", llama_server.__file__, json.dumps(wanted)], stdin=subprocess.PIPE
    )
    yield supervisor
    supervisor.kill()
    supervisor.wait()
    assert supervisor.stdin is not None
    supervisor.stdin.close()


def test_a_program_ends_with_the_pipe(supervised: subprocess.Popen[bytes], tmp_path: Path) -> None:
    deadline = time.monotonic() + 30
    while not (tmp_path / "said").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    pid, *arguments = (tmp_path / "said").read_text().split()
    given = dict(itertools.pairwise(arguments))
    assert (given["--threads"], given["--parallel"], given["--ctx-size"]) == ("2", "4", "1024")
    assert (given["--spec-draft-n-max"], given["--spec-synth-rates"]) == ("3", "0.5,0.25,0.0")
    assert supervised.stdin is not None
    supervised.stdin.close()
    assert supervised.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
