"""Compile the Triton kernels of one file for an H100, on any machine; print what each needs, as JSON lines.

A process of its own: under the interpreter that the other tests use, there is nothing to compile.
"""

import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.kernels.variants import Variant

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_for_sm90(variant: Variant) -> dict[str, Any]:
    """Return registers, bytes of shared memory and of spilled registers, and instructions that spill."""
    kernel, names = variant.kernel, variant.kernel.arg_names
    absent = [name for name, value in variant.constants.items() if value is None]
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    types = {**variant.types, **dict.fromkeys(variant.constants, "constexpr")}
    # What a launch finds out of itself: tensors and strides are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if types[n][0] == "*" or types[n] == "i64"
    }
    assert set(names) == set(types), f"{variant}: {set(names) ^ set(types)} {absent}"
    source = ASTSource(fn=kernel, signature={n: types[n] for n in names}, constexprs=constants, attrs=aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    compiled = triton.compile(source, target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (_dump(file.name, option) for option in ("--dump-resource-usage", "--dump-sass"))
    words = next(line for line in usage.splitlines() if "REG:" in line).split()
    needs = {key: int(number) for key, _, number in (w.partition(":") for w in words if ":" in w[:-1])}
    return {
        "variant": str(variant),
        "registers": needs["REG"],
        "stack": needs["STACK"],
        "shared": compiled.metadata.shared,
        "spills": code.count("LDL") + code.count("STL"),
    }


def _dump(path: str, option: str) -> str:
    command = [str(TOOLS / "cuobjdump"), option, path]
    tools = {"PATH": f"{TOOLS}:/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=tools).stdout


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for own in import_module(name).VARIANTS:
            print(json.dumps(compile_for_sm90(own)), flush=True)
