"""Run what depends on a processor's features once more, without them: `python -m tests.processors`.

Features are taken away by the switches of who uses them: the C forms' own, ATen's, oneDNN's and MKL's.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

from specdec.kernels.native.targets import VARIABLE, features, named

_NAMES = ("native", "native_products", "native_prompts", "integers", "tape", "ffn", "moe", "norm")
KERNELS = tuple(f"tests/kernels/test_{name}.py" for name in (*_NAMES, "quantised_kv", "snapshots"))
"""Whose outcome rests on which forms run, for they compare their bits."""
ENGINES = (
    *(f"tests/models/test_{name}.py" for name in ("bfloat16", "network", "replay", "shipped", "taking_back")),
    "tests/draft/test_unrolled.py",
    "tests/engine/test_threads.py",
    "tests/lossless/test_drafts.py",
)
"""What engines do with them, which is the same wherever there are no units for bfloat16."""
FILES = (*KERNELS, *ENGINES)

_TORCH = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
WITHOUT: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "avx512": (KERNELS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "avx2-vnni": (KERNELS, {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", **_TORCH}),
    "avx2": (FILES, {"ONEDNN_MAX_CPU_ISA": "AVX2", **_TORCH}),
}
"""By what the C forms are compiled for: the files, and the switches of torch's libraries."""


def main(options: list[str]) -> int:
    """Run the files in each way that this processor has; the first that fails ends it."""
    for name, (files, others) in WITHOUT.items():
        if missing := set(named(name).needs) - features():
            print(f"not run, {name}: this processor has no {', '.join(sorted(missing))}", flush=True)
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
