"""Compile the C sources for this processor, once, and keep the result in the user's cache."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from specdec.kernels.native.signatures import replayer

logger = logging.getLogger(__name__)

SOURCES = ("narrow.c", "vectors.inc", "narrow.inc", "matrix.inc", "integer.inc", "sampling.inc", "pool.inc")
MOST = 64
"""The longest pending path and the widest window that the C forms have room for."""
RANKED = 64
"""The longest ranking that is kept in order by insertion."""
TARGET = "SPECDEC_MARCH"
"""The environment variable that names another processor than this one to compile for, as for -march."""
FLAGS = (
    *("-O3", "-fPIC", "-std=gnu11"),
    *(f"-DMOST={MOST}", f"-DRANKED={RANKED}"),
    # Sums may be reordered, as the vector units need; infinities and NaN keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
COMPILE_SECONDS = 120


THREADS = ("-fopenmp", "-fopenmp-simd")
"""With torch's threads, or where they cannot be reached, with the caller's alone."""


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Return the compiled operations, or None where they cannot be had; what was chosen is logged once."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.warning("no C compiler was found: narrow windows run in plain torch, which is slower")
        return None
    for threads in THREADS:
        try:
            loaded = ctypes.CDLL(str(_compiled(compiler, _flags(threads))))
        except (OSError, subprocess.SubprocessError) as error:
            failure = error
        else:
            logger.info("narrow windows run in C (%s, %s)", compiler, threads)
            return loaded
    said = getattr(failure, "stderr", None) or b""
    logger.warning(
        "the C forms could not be made (%s%s): narrow windows run in plain torch, which is slower",
        failure,
        f"; {said.decode(errors='replace').strip()}" if said else "",
    )
    return None


def _flags(threads: str) -> tuple[str, ...]:
    return (*FLAGS, threads, f"-march={os.environ.get(TARGET) or 'native'}")


def _compiled(compiler: str, flags: Sequence[str]) -> Path:
    """Find the library in the user's cache or make it there; without one, in a folder of this process."""
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in SOURCES) + replayer().encode()
    recipe = "\n".join((compiler, *flags, platform.machine(), _processor())).encode()
    name = f"{hashlib.sha256(recipe + text).hexdigest()[:20]}.so"
    try:
        target = _cache_folder() / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() or os.access(target.parent, os.W_OK):
            return target if target.exists() else _compile(compiler, flags, target)
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written to
        logger.info("the C forms cannot be kept for the next start: %s", error)
    return _compile(compiler, flags, Path(tempfile.mkdtemp(prefix="specdec-")) / name)


def _compile(compiler: str, flags: Sequence[str], target: Path) -> Path:
    """Compile for OpenMP, but link none: what is missing is found in the one that torch brought along."""
    forms = Path(__file__).parent / SOURCES[0]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="making-") as folder:
        # Made beside its place and moved there whole, so that processes starting together see no half of it.
        source, part, whole = f"{folder}/whole.c", f"{folder}/part.o", f"{folder}/whole.so"
        Path(source).write_text(f'#include "{forms}"\n{replayer()}')
        steps = ([*flags, "-c", source, "-o", part], ["-shared", part, "-o", whole, "-lm"])
        for step in steps:
            command = [*compiler.split(), *step]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
        os.replace(whole, target)
    return target


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specdec" / "native"


def _processor() -> str:
    """Name the processor's abilities: a cache may be shared by machines that differ in them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
