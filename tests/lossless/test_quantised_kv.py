"""8-bit KV changes the text once; drafts do not change it further."""

from pathlib import Path

import pytest

from specdec.config.engine import EngineConfig
from specdec.kernels.attention.quantise import FP8
from specdec.kernels.native.compiled import compiled
from specdec.setup.footprint import describe_model
from tests.lossless.cases import SHAPES, Case, differences, drafting_engine, generate, plain_cases

FAMILY = "qwen3_5"


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[Path, list[Case]]:
    """Return a checkpoint and its plain decoding outputs with 8-bit KV."""
    return folder, plain_cases(folder, kv_dtype="fp8")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", ["oracle", "mtp"])
def test_drafts_do_not_change_the_text(plain: tuple[Path, list[Case]], drafter: str, shape: str) -> None:
    folder, cases = plain
    with drafting_engine(folder, drafter, cases, kv_dtype="fp8", chunk_tokens=5, **SHAPES[shape]) as (
        engine,
        seen,
    ):
        assert engine.model.settings.layout.page_dtype == FP8
        assert differences(cases, generate(engine, cases)) == []
    assert seen.mixed > 0 and seen.outcomes["part"] > 0


def test_eight_bits_are_not_the_models_own(plain: tuple[Path, list[Case]]) -> None:
    """The log-probabilities differ, which shows that the engine above used 8 bits."""
    folder, cases = plain
    with drafting_engine(folder, "none", cases) as (engine, _):
        assert differences(cases, generate(engine, cases)) != []


def test_a_token_takes_a_byte_for_each_number(plain: tuple[Path, list[Case]]) -> None:
    wide, narrow = (
        describe_model(plain[0], EngineConfig(device="cpu", dtype="bfloat16", kv_dtype=kind), [64])
        for kind in ("auto", "fp8")
    )
    assert (wide["kv_dtype"], narrow["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert wide["kv_bytes_per_token"] == 2 * narrow["kv_bytes_per_token"]


@pytest.mark.skipif(compiled() is None, reason="no C compiler")
def test_a_c_kernel_without_an_8_bit_cache_is_reported(
    plain: tuple[Path, list[Case]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for kind, said in (("auto", False), ("fp8", True)):
        caplog.clear()
        describe_model(plain[0], EngineConfig(device="cpu", kernels="native", kv_dtype=kind), [64])
        assert any("FP8 keys" in record.getMessage() for record in caplog.records) == said
