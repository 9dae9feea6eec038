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
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = ("narrow.c", "narrow.inc")
FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11"),
    # Sums may be reordered, as the vector units need; infinities and NaN keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
COMPILE_SECONDS = 120


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled operations, or None where there is no compiler; what was chosen is logged once."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.warning("no C compiler was found: narrow windows run in plain torch, which is slower")
        return None
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in SOURCES)
    recipe = "\n".join((compiler, *FLAGS, platform.machine(), _processor())).encode()
    target = _cache_folder() / f"{hashlib.sha256(recipe + text).hexdigest()[:20]}.so"
    try:
        if not target.exists():
            _compile(compiler, folder / SOURCES[0], target)
        loaded = ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the C sources did not compile (%s): narrow windows run in plain torch", error)
        return None
    logger.info("narrow windows run in C (%s)", compiler)
    return loaded


def _compile(compiler: str, source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and moved there whole, so that processes starting together see no half of it.
    handle, draft = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        command = [*compiler.split(), *FLAGS, str(source), "-o", draft, "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
        os.replace(draft, target)
    finally:
        Path(draft).unlink(missing_ok=True)


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
