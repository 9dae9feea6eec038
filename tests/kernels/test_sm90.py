"""Every Triton kernel compiles for an H100, in every variant that is launched, and keeps to its registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parent
FILES = sorted(
    ".".join(("specdec", *path.relative_to(ROOT).with_suffix("").parts))
    for path in ROOT.glob("kernels/*/*.py")
    if any(sign in path.read_text() for sign in ("num_warps", "\nVARIANTS"))
)
"""What launches a kernel names its warps."""


@pytest.mark.parametrize("module", FILES)
def test_nothing_spills_on_sm90(module: str) -> None:
    """A process of its own, since in this one kernels are made for the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.sm90", module]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found, f"{module} lists no variants"
    assert [own for own in found if own["spills"] or own["stack"]] == []
