"""Kernels launched by real shapes: compiled before the first request, and without spills on an H100."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specdec
from tests.kernels.sm90 import RECURRENT, WHOLE
from tests.selection import EXHAUSTIVE, only

ROOT = Path(specdec.__file__).parents[1]
STACK = 128
"""Bytes of stack allowed per thread in float32, where heads of 128 and 256 exceed the registers."""


def run(*words: str) -> list[dict[str, Any]]:
    """Run the launching process; in this one kernels are bound to the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.sm90", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@EXHAUSTIVE
@pytest.mark.parametrize("case", ["qwen3-next", "nemotron-h", "qwen3.5", "lfm3", "kimi-linear", "float32"])
def test_nothing_is_compiled_while_others_wait_and_nothing_spills(case: str) -> None:
    served, *compiled = run(case)
    assert served == {"case": case, "late": []}
    allowed = STACK if case == "float32" else 0
    assert len(compiled) > 25
    assert [own for own in compiled if own["stack"] > allowed or own["shared"] > 232_448] == []


@EXHAUSTIVE
@pytest.mark.parametrize("case", only({"recurrent float32"}, RECURRENT))
def test_recurrent_layers_are_compiled_beforehand_and_without_spills(case: str) -> None:
    served, *compiled = run(case)
    assert served == {"case": case, "late": []}
    assert {own["kernel"].split(".")[2] for own in compiled} == RECURRENT[case][2]
    allowed = STACK if case.endswith("float32") else 0
    assert [own for own in compiled if own["stack"] > allowed or own["shared"] > 232_448] == []


@EXHAUSTIVE
@pytest.mark.parametrize("case", WHOLE)
def test_integer_products_do_not_spill_and_are_equal_in_every_window(case: str) -> None:
    """A product shared by four warps may sum in a different order than one warp's."""
    served, *compiled = run(case)
    assert served == {"case": case, "late": []}
    allowed = STACK if case.startswith("float32") else 0
    assert [own for own in compiled if own["stack"] > allowed or own["shared"] > 232_448] == []
    tall = {}
    for own in compiled:
        height = int(re.findall(r"BLOCK_T=(\d+)", own["kernel"])[0])
        tall.setdefault(height, set()).add(own["together"])
    assert tall == {16: {False}, 32: {False}, 64: {False}, 128: {True}}


@EXHAUSTIVE
def test_an_engine_without_precompilation_compiles_while_serving() -> None:
    """The control: every part of a step has kernels to compile."""
    (served,) = run("--cold", "qwen3-next")
    late = {name.split()[0].rpartition(".")[2] for name in served["late"]}
    assert {"_linear", "_fold_state", "_part", "_walk", "_promote", "_prune"} <= late
