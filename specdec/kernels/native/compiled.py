"""Load the C kernels for this processor: prebuilt, or compiled once into the user's cache."""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.kernels.native.signatures import replayer
from specdec.kernels.native.targets import NATIVE, CompileTarget, candidates, features, unused

logger = logging.getLogger(__name__)

SOURCES = (
    *("narrow.c", "vectors.inc", "pool.inc", "workspace.inc", "scalars.inc"),
    *("recurrence.inc", "attention.inc", "sampling.inc", "tensors.inc", "blocks.inc"),
    *("integer.inc", "amx.inc"),
    *("typed.inc", "pointwise.inc", "convolution.inc", "delta_net.inc", "selective.inc"),
    *("self_attention.inc", "logits.inc", "matrix.inc"),
)
MOST = 64
"""Longest pending path and widest tentative window that the C kernels support."""
RANKED = 64
"""Longest ranking maintained by insertion."""
BUILT = Path(__file__).parent / "built"
"""Folder of prebuilt libraries, written by build.py; wheels may include it."""
FLAGS = (
    *("-O3", "-fPIC", "-std=gnu11"),
    *(f"-DMOST={MOST}", f"-DRANKED={RANKED}"),
    # Allow reordered sums for vectorisation, but preserve infinities and NaN.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
COMPILE_SECONDS = 120
DIGEST = 16
"""Length of the source digest in a library's name."""

THREADS = ("-fopenmp", "-fopenmp-simd")
"""Use OpenMP with torch's number of threads, or else only the calling thread."""


@dataclass(frozen=True, slots=True)
class LoadedKernels:
    """The C kernels and their compilation target."""

    library: ctypes.CDLL
    target: CompileTarget


def compiled() -> ctypes.CDLL | None:
    """Return the C kernels, or None if they are not available."""
    found = loaded()
    return found.library if found else None


@functools.cache
def loaded() -> LoadedKernels | None:
    """Load the best library for this processor; log the choice and skipped targets, once."""
    compiler, failed = find_compiler(), None
    for target in candidates():
        failure = None
        for threads in THREADS:
            try:
                path = _place(compiler, target, threads)
                library = path and ctypes.CDLL(str(path))
            except (OSError, subprocess.SubprocessError) as error:
                failure = error
            else:
                if path and library:
                    left = f", {', '.join(unused(target))} unused" if unused(target) else ""
                    logger.info("C kernels for %s (%s, %s)%s", target.name, path, threads, left)
                    return LoadedKernels(library, target)
        failed = failure or failed
        if failure:
            logger.info("no C kernels for %s: %s", target.name, explain(failure))
    logger.warning(
        "%s: narrow windows run in plain torch, which is slower",
        f"the C kernels could not be compiled ({explain(failed)})" if failed else "no C compiler was found",
    )
    return None


def find_compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def explain(failure: Exception) -> str:
    """Format an error with the compiler's output."""
    stderr: bytes = getattr(failure, "stderr", None) or b""
    return f"{failure}; {stderr.decode(errors='replace').strip()}" if stderr else str(failure)


def _place(compiler: str | None, target: CompileTarget, threads: str) -> Path | None:
    """Find the prebuilt or cached library, or compile it into the user's cache.

    Without a writable cache it is compiled into a temporary folder. None: there is no compiler.
    """
    flags = flags_for(target, threads)
    beforehand = BUILT / file_name(target, flags)
    if beforehand.exists() or compiler is None:
        return beforehand if beforehand.exists() else None
    name = file_name(target, flags, compiler)
    try:
        path = _cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() or os.access(path.parent, os.W_OK):
            return path if path.exists() else _compile_here(compiler, flags, path, target)
    except (OSError, RuntimeError) as error:  # no home folder, or not writable
        logger.info("the C kernels cannot be cached for the next start: %s", error)
    return _compile_here(compiler, flags, Path(tempfile.mkdtemp(prefix="specdec-")) / name, target)


def _compile_here(compiler: str, flags: Sequence[str], path: Path, target: CompileTarget) -> Path:
    """Compile, and announce it, since it takes seconds."""
    note, start_s = (
        f"Compiling the C kernels for this processor ({target.name}), once",
        time.perf_counter(),
    )
    logger.info("%s, by %s", note, compiler)
    if sys.stderr and sys.stderr.isatty():
        print(f"{note} …", file=sys.stderr, flush=True)
    compile_(compiler, flags, path)
    logger.info("the C kernels are compiled, in %.1f s: %s", time.perf_counter() - start_s, path)
    return path


def flags_for(target: CompileTarget, threads: str) -> tuple[str, ...]:
    return (*FLAGS, threads, *target.flags)


def file_name(target: CompileTarget, flags: Sequence[str], compiler: str = "") -> str:
    """Return a library's file name from its target, sources, compiler and flags.

    Different machines may share a cache: for `native` the name includes the processor's features.
    """
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in SOURCES) + replayer().encode()
    processor = " ".join(sorted(features())) if target.flags == NATIVE.flags else ""
    recipe = "\n".join((compiler, *flags, processor)).encode()
    return f"{target.name}-{hashlib.sha256(recipe + text).hexdigest()[:DIGEST]}.so"


def source() -> str:
    """Return the C source: the kernels and the replay function."""
    return f'#include "{Path(__file__).parent / SOURCES[0]}"\n{replayer()}'


def compile_(compiler: str, flags: Sequence[str], path: Path) -> Path:
    """Compile with OpenMP but do not link it: its symbols resolve to torch's OpenMP runtime."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as folder:
        # Compile next to the destination and rename, so concurrent processes never see a partial file.
        text, part, library = f"{folder}/whole.c", f"{folder}/part.o", f"{folder}/whole.so"
        Path(text).write_text(source())
        steps = ([*flags, "-c", text, "-o", part], ["-shared", "-pthread", part, "-o", library, "-lm"])
        for step in steps:
            command = [*compiler.split(), *step]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
        os.replace(library, path)
    return path


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specdec" / "native"
