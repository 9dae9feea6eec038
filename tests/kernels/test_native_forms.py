"""The compile target of the C kernels can be chosen, and is reported."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdec import EngineConfig
from specdec.kernels.native import build, compiled, instruction_sets, targets
from specdec.setup.resolve import CACHED_WEIGHTS, _dtype
from tests import processors
from tests.selection import EXHAUSTIVE

HASWELL = "fpu sse sse2 avx fma movbe f16c bmi1 avx2 bmi2"
CASCADE_LAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"


needs_c = pytest.mark.skipif(compiled.compiled() is None, reason="there is no C compiler")
uncached: Callable[[], compiled.LoadedKernels | None] = compiled.loaded.__wrapped__


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache, without prebuilt libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "BUILT", tmp_path / "built")
    return tmp_path / "specdec" / "native"


@pytest.mark.parametrize(
    ("machine", "flags", "wanted"),
    [
        ("x86_64", CASCADE_LAKE, "avx512-vnni"),
        ("x86_64", f"{CASCADE_LAKE} avx512_bf16", "avx512-bf16"),
        ("x86_64", f"{CASCADE_LAKE} avx512_bf16 amx_tile amx_bf16 amx_int8 avx_vnni", "amx"),
        ("x86_64", CASCADE_LAKE.replace("avx512_vnni", ""), "avx512"),
        ("x86_64", HASWELL, "avx2"),
        ("x86_64", f"{HASWELL} avx_vnni", "avx2-vnni"),
        ("x86_64", "fpu sse sse2 ssse3 avx", "x86-64"),
        ("aarch64", "fp asimd evtstrm aes", "neon"),
        ("aarch64", "fp asimd asimdhp asimddp", "neon-dot"),
        ("aarch64", "fp asimd asimdhp asimddp sve bf16", "neon-bf16"),
        ("aarch64", "fp asimd asimdhp asimddp sve i8mm bf16", "neon-i8mm"),
        ("riscv64", "", "native"),
        ("arm64", "", "native"),
    ],
)
def test_the_best_supported_target_is_selected(
    machine: str, flags: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(targets.VARIABLE, raising=False)
    monkeypatch.setattr(targets, "features", lambda: frozenset(flags.split()))
    monkeypatch.setattr("platform.machine", lambda: machine)
    first, *others = targets.candidates()
    assert first.name == wanted
    assert all(own.machine in (None, machine) for own in others) and targets.NATIVE in (first, *others)


def test_unused_features_of_a_target_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    have = frozenset(f"{CASCADE_LAKE} avx512_bf16 avx512_fp16 avx_vnni aes".split())
    monkeypatch.setattr(targets, "features", lambda: have)
    assert targets.unused(targets.named("avx512-bf16")) == ["avx512_fp16"]
    assert targets.unused(targets.named("avx512-vnni")) == ["avx512_bf16", "avx512_fp16"]
    assert {"avx512f", "avx_vnni"} <= set(targets.unused(targets.named("avx2")))
    assert not targets.unused(targets.NATIVE) and not targets.unused(targets.named("x86-64-v3"))


def test_each_target_has_its_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may share a cache: all but `native` are identical on each of them."""

    def names(features: str) -> dict[str, str]:
        monkeypatch.setattr(compiled, "features", lambda: frozenset(features.split()))
        return {
            own.name: compiled.file_name(own, compiled.flags_for(own, "-fopenmp"), "cc")
            for own in targets.TARGETS
        }

    here, there = names(CASCADE_LAKE), names(HASWELL)
    assert len(set(here.values())) == len(targets.TARGETS)
    assert {name for name in here if here[name] != there[name]} == {"native"}


def test_a_librarys_name_depends_on_every_source() -> None:
    folder = Path(compiled.__file__).parent
    written = {file.name for file in folder.iterdir() if file.suffix in (".c", ".inc")}
    assert written == set(compiled.SOURCES) and len(written) == len(compiled.SOURCES)


@EXHAUSTIVE
@needs_c
def test_a_target_that_the_compiler_does_not_know_is_passed_over(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-O1"))  # the library is compiled but not run
    newer = replace(targets.NATIVE, name="newer", flags=("-mno-such-unit",))
    monkeypatch.setattr(compiled, "candidates", lambda: (newer, targets.NATIVE))
    with caplog.at_level(logging.INFO):
        found = uncached()
    assert found is not None and found.target == targets.NATIVE
    said = [record.message for record in caplog.records if "ompil" not in record.message[:30]]
    assert len(said) == 2 and "newer" in said[0] and "no-such-unit" in said[0]
    assert "native" in said[1] and [own.name.split("-")[0] for own in cache.iterdir()] == ["native"]


@needs_c
def test_an_unknown_compiler_target_is_reported(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(targets.VARIABLE, "no-such-processor")
    with caplog.at_level(logging.WARNING):
        assert uncached() is None
    assert "no-such-processor" in caplog.text and "plain torch" in caplog.text


def test_a_target_that_cannot_run_here_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(targets, "features", lambda: frozenset(HASWELL.split()))
    monkeypatch.setenv(targets.VARIABLE, "avx2-vnni")
    with caplog.at_level(logging.WARNING):
        assert uncached() is None
    assert "avx_vnni" in caplog.text and "plain torch" in caplog.text


@needs_c
@EXHAUSTIVE
def test_a_process_without_a_compiler_uses_the_prebuilt_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In C, in a process that finds no compiler; and in torch without the library."""
    found = compiled.loaded()
    assert found is not None
    name = found.target.name
    if name not in build.PORTABLE:
        pytest.skip(f"{name} is not made beforehand")
    place = compiled.BUILT / f"{name}-{'0' * compiled.DIGEST}.so"
    place.parent.mkdir()
    place.touch()
    assert build.main([name]) == 0
    made = Path(capsys.readouterr().out.strip())
    assert list(compiled.BUILT.iterdir()) == [made]
    script = (
        "import pathlib, torch; from specdec.kernels.native import compiled, linear\n"
        f"compiled.BUILT = pathlib.Path({str(compiled.BUILT)!r})\n"
        "print(compiled.find_compiler(), compiled.compiled() and compiled.compiled()._name)\n"
        "y = linear.linear(torch.ones(2, 4), linear.pack(torch.ones(3, 4)))\n"
        "assert torch.equal(y, torch.full((2, 3), 4.0))"
    )
    alone = {"PATH": "", "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(Path(__file__).parents[2])}
    alone |= {key: value for key, value in os.environ.items() if key == targets.VARIABLE}
    for wanted in (f"None {made}", "None None"):
        ended = subprocess.run([sys.executable, "-c", script], env=alone, capture_output=True, text=True)
        assert ended.stdout.strip() == wanted, ended.stderr
        made.unlink(missing_ok=True)


def test_an_unknown_target_is_not_built(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build.main(["avx2", "native"])
    assert "no target native" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "no C kernels; torch for "),
        (
            instruction_sets.InstructionSets(targets.named("avx512-bf16"), "AVX-512", True, "VNNI", False),
            "C kernels for avx512-bf16: AVX-512 with bfloat16 units, integer products by VNNI, "
            "avx512_fp16 unused; torch",
        ),
        (
            instruction_sets.InstructionSets(targets.NATIVE, "AVX-512", True, "VNNI", True),
            "C kernels for native: AVX-512 with bfloat16 and matrix units, integer products by VNNI; torch",
        ),
        (
            instruction_sets.InstructionSets(targets.named("x86-64-v3"), "AVX2", False, "16 bits", False),
            "C kernels for x86-64-v3: AVX2 without bfloat16 units, integer products by 16 bits; torch",
        ),
    ],
)
def test_the_selected_kernel_is_reported(
    found: instruction_sets.InstructionSets | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruction_sets, "c_kernels", lambda: found)
    have = frozenset(f"{CASCADE_LAKE} avx512_bf16 avx512_fp16".split())
    monkeypatch.setattr(targets, "features", lambda: have)
    monkeypatch.setenv(instruction_sets.LIBRARY, "AVX2")
    told = instruction_sets.describe()
    assert words in told and "oneDNN up to AVX2" in told
    assert (
        instruction_sets.describe_kernels("native") == f"native: {told}"
        and instruction_sets.describe_kernels("cpu") == "cpu"
    )


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("library", [True, False])
def test_bfloat16_stays_where_something_multiplies_it_well(
    in_c: bool, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C kernels need no bfloat16 units; in torch it is fast only if the library has such kernels."""
    monkeypatch.setattr("specdec.setup.resolve.compiled", lambda: object() if in_c else None)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: library)
    cpu, config = torch.device("cpu"), EngineConfig()
    small, large = (_dtype(config, cpu, torch.bfloat16, CACHED_WEIGHTS + more) for more in (0, 1))
    assert small == (torch.bfloat16 if in_c else torch.float32)
    assert large == (torch.bfloat16 if in_c or library else torch.float32)
    assert _dtype(config, cpu, torch.float16, 1) == torch.float32


def test_processor_dependent_files_exist() -> None:
    root = Path(__file__).parents[2]
    assert all((root / name).is_file() for name in processors.FILES)
    assert len(set(processors.FILES)) == len(processors.FILES)


@pytest.mark.parametrize(
    ("best", "runs"), [("avx512-bf16", ["avx512", "avx2"]), ("avx512", ["avx2"]), ("avx2", [])]
)
def test_older_targets_are_rerun_and_the_own_one_is_not(
    best: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def run(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        found.append(env[targets.VARIABLE])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(processors.subprocess, "run", run)
    monkeypatch.setattr(processors, "features", lambda: {*targets.named(best).needs})
    monkeypatch.setattr(processors, "candidates", lambda: (targets.named(best),))
    assert processors.main([]) == 0
    assert found == runs
