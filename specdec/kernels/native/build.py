"""Prebuild the C kernels for machines without a C compiler.

    python -m specdec.kernels.native.build [TARGET ...]

Libraries are written into the package, where they take precedence over compiling; wheels built afterwards
include them. $CC may be a cross-compiler.
"""

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec.kernels.native import compiled
from specdec.kernels.native.targets import NATIVE, TARGETS, CompileTarget

PORTABLE = {target.name: target for target in TARGETS if target is not NATIVE}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the named targets, which must succeed, or all of this machine's architecture."""
    parser = argparse.ArgumentParser(prog="python -m specdec.kernels.native.build", description=__doc__)
    parser.add_argument("target", nargs="*", metavar="TARGET", help=f"any of {', '.join(PORTABLE)}")
    names = parser.parse_args(arguments).target
    if unknown := [name for name in names if name not in PORTABLE]:
        parser.error(f"there is no target {unknown[0]}; use any of {', '.join(PORTABLE)}")
    compiler = compiled.find_compiler()
    if compiler is None:
        parser.error("there is no C compiler; install cc, gcc or clang, or set CC")
    here = [target.name for target in PORTABLE.values() if target.machine == platform.machine()]
    failed = 0
    for name in names or here:
        try:
            print(build(compiler, PORTABLE[name]))
        except subprocess.SubprocessError as error:
            print(f"{name}: {compiled.explain(error)}", file=sys.stderr)
            failed += 1
    return 1 if failed and (names or failed == len(here)) else 0


def build(compiler: str, target: CompileTarget) -> Path:
    """Compile for a target and delete its libraries of older sources."""
    flags = compiled.flags_for(target, compiled.THREADS[0])
    path = compiled.BUILT / compiled.file_name(target, flags)
    path.parent.mkdir(exist_ok=True)
    compiled.compile_(compiler, flags, path)
    for older in path.parent.glob(f"{target.name}-{'[0-9a-f]' * compiled.DIGEST}.so"):
        if older != path:
            older.unlink()
    return path


if __name__ == "__main__":
    sys.exit(main())
