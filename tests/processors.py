"""Run what depends on a processor's features once more, without them: `python -m tests.processors`.

Features are taken away by the switches of who uses them: the C forms' own, ATen's, oneDNN's and MKL's.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

KERNELS = ("native", "native_forms", "native_products", "native_prompts", "tape", "ffn", "moe", "norm")
FILES = (
    *(f"tests/kernels/test_{name}.py" for name in (*KERNELS, "quantised_kv", "snapshots")),
    *(f"tests/models/test_{name}.py" for name in ("bfloat16", "network", "replay", "shipped", "taking_back")),
    "tests/draft/test_unrolled.py",
    "tests/engine/test_threads.py",
    "tests/lossless/test_drafts.py",
)
"""Whose outcome rests on which forms run: they compare their bits, or what engines do with them."""

WITHOUT: Mapping[str, tuple[frozenset[str], Mapping[str, str]]] = {
    "AVX-512 without units for bfloat16": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}),
        {"SPECDEC_MARCH": "x86-64-v4", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    ),
    "AVX2": (
        frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}),
        {
            "SPECDEC_MARCH": "x86-64-v3",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
}
"""By name: what the processor must have for it, as Linux names it, and the switches."""


def main(options: list[str]) -> int:
    """Run the files in each way that this processor has; the first that fails ends it."""
    for name, (needed, switches) in WITHOUT.items():
        if missing := needed - _features():
            print(f"not run, {name}: this processor has no {', '.join(sorted(missing))}", flush=True)
            continue
        print(f"{name}: {' '.join('='.join(pair) for pair in switches.items())}", flush=True)
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *FILES], env={**os.environ, **switches}
        )
        if ended.returncode:
            return ended.returncode
    return 0


def _features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
