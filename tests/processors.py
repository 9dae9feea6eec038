"""Rerun CPU-dependent tests with newer CPU features disabled: `python -m tests.processors`.

The switches cover the C kernels, ATen, oneDNN and MKL.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

from specdec.kernels.native.targets import VARIABLE, candidates, features, named

_NAMES = ("native", "native_products", "native_prompts", "integers", "tape", "ffn", "moe", "norm")
KERNELS = tuple(f"tests/kernels/test_{name}.py" for name in (*_NAMES, "quantised_kv", "snapshots"))
"""Tests that compare the bits of C kernels."""
ENGINES = (
    *(f"tests/models/test_{name}.py" for name in ("bfloat16", "network", "replay", "shipped", "taking_back")),
    "tests/draft/test_unrolled.py",
    "tests/engine/test_threads.py",
    "tests/lossless/test_drafts.py",
)
"""Engine tests whose outcome is the same on every CPU without bfloat16 units."""
FILES = (*KERNELS, *ENGINES)

_TORCH = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
WITHOUT: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "avx512": (KERNELS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "avx2-vnni": (KERNELS, {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", **_TORCH}),
    "avx2": (FILES, {"ONEDNN_MAX_CPU_ISA": "AVX2", **_TORCH}),
}
"""By target of the C kernels: the test files, and the switches of torch's libraries."""


def main(options: list[str]) -> int:
    """Run the files for each older target that this CPU can imitate; stop at the first failure."""
    for name, (files, others) in WITHOUT.items():
        if missing := set(named(name).needs) - features():
            print(f"not run, {name}: this CPU has no {', '.join(sorted(missing))}", flush=True)
            continue
        if name == candidates()[0].name:
            print(f"not run, {name}: the other tests run with it on this CPU", flush=True)
            continue
        switches = {VARIABLE: name, **others}
        print(" ".join("=".join(pair) for pair in switches.items()), flush=True)
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files], env={**os.environ, **switches}
        )
        if ended.returncode:
            return ended.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
