"""What the C forms are compiled for can be chosen, and is told."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from specdec import EngineConfig
from specdec.kernels.native import compiled, forms
from specdec.setup.resolve import CACHED_WEIGHTS, _dtype
from tests import processors


def test_each_target_has_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that share a cache may be told to share one."""
    made: dict[str, Path] = {}

    def compile_(compiler: str, flags: Sequence[str], target: Path) -> Path:
        (machine,) = (flag for flag in flags if flag.startswith("-march="))
        made[machine] = target
        return target

    monkeypatch.setattr(compiled, "_compile", compile_)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for target in ("", "x86-64-v3", "x86-64-v4"):
        monkeypatch.setenv(compiled.TARGET, target)
        compiled._compiled("cc", compiled._flags("-fopenmp"))
    assert list(made) == ["-march=native", "-march=x86-64-v3", "-march=x86-64-v4"]
    assert len(set(made.values())) == 3


@pytest.mark.skipif(compiled.compiled() is None, reason="there is no C compiler")
def test_a_target_that_the_compiler_does_not_know_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(compiled.TARGET, "no-such-processor")
    uncached: Callable[[], object] = compiled.compiled.__wrapped__
    with caplog.at_level(logging.WARNING):
        assert uncached() is None
    assert "no-such-processor" in caplog.text and "plain torch" in caplog.text


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (None, True),
        ("", True),
        ("ALL", True),
        ("default", True),
        ("no such name", True),
        ("AVX512_CORE_AMX", True),
        ("avx512_core_amx_fp16", True),
        ("AVX10_1_512_AMX", True),
        ("AVX512_CORE_FP16", False),
        ("avx512_core_bf16", False),
        ("AVX10_1_512", False),
        ("AVX2_VNNI_2", False),
        ("SSE41", False),
    ],
)
def test_matrix_units_are_left_out_where_the_library_may_not_use_them(
    limit: str | None, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiled:
        """Of a processor that has all."""

        def __getattr__(self, name: str) -> Callable[[], object]:
            def answer() -> object:
                return b"AVX-512" if name in ("vectors", "integers") else 1

            setattr(self, name, answer)
            return answer

    monkeypatch.setattr(forms, "compiled", Compiled)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.delenv(forms.LIBRARY, raising=False)
    if limit is not None:
        monkeypatch.setenv(forms.LIBRARY, limit)
    found = forms.forms.__wrapped__()
    assert found is not None and found.pairs and found.tiles == left


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "no C forms; torch for "),
        (
            forms.Forms("native", "AVX-512", True, "", False),
            "AVX-512 with bfloat16 units (-march=native)",
        ),
        (forms.Forms("native", "AVX-512", True, "", True), "AVX-512 with bfloat16 and matrix units"),
        (
            forms.Forms("x86-64-v3", "AVX2", False, "", False),
            "AVX2 without bfloat16 units (-march=x86-64-v3)",
        ),
    ],
)
def test_what_runs_is_told(found: forms.Forms | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "forms", lambda: found)
    monkeypatch.setenv(forms.LIBRARY, "AVX2")
    told = forms.describe()
    assert words in told and "oneDNN up to AVX2" in told
    assert forms.describe_kernels("native") == f"native: {told}" and forms.describe_kernels("cpu") == "cpu"


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("library", [True, False])
def test_bfloat16_stays_where_something_multiplies_it_well(
    in_c: bool, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C forms need no units for it; torch's attention to a prompt needs the library."""
    monkeypatch.setattr("specdec.setup.resolve.compiled", lambda: object() if in_c else None)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: library)
    cpu, config = torch.device("cpu"), EngineConfig()
    small, large = (_dtype(config, cpu, torch.bfloat16, CACHED_WEIGHTS + more) for more in (0, 1))
    assert small == (torch.bfloat16 if in_c and library else torch.float32)
    assert large == (torch.bfloat16 if library else torch.float32)
    assert _dtype(config, cpu, torch.float16, 1) == torch.float32


def test_files_that_depend_on_the_processor_are_there() -> None:
    root = Path(__file__).parents[2]
    assert all((root / name).is_file() for name in processors.FILES)
    assert len(set(processors.FILES)) == len(processors.FILES)
