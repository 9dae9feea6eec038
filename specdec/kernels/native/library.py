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
MOST = 64
"""The longest pending path and the widest window that the C forms have room for."""
FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11", f"-DMOST={MOST}"),
    # Sums may be reordered, as the vector units need; infinities and NaN keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
COMPILE_SECONDS = 120


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled operations, or None where they cannot be had; what was chosen is logged once."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.warning("no C compiler was found: narrow windows run in plain torch, which is slower")
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        logger.warning(
            "the C forms could not be made (%s%s): narrow windows run in plain torch, which is slower",
            error,
            f"; {said.decode(errors='replace').strip()}" if said else "",
        )
        return None
    logger.info("narrow windows run in C (%s)", compiler)
    return loaded


def _compiled(compiler: str) -> Path:
    """Find the library in the user's cache or make it there; without one, in a folder of this process."""
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in SOURCES)
    recipe = "\n".join((compiler, *FLAGS, platform.machine(), _processor())).encode()
    name = f"{hashlib.sha256(recipe + text).hexdigest()[:20]}.so"
    try:
        target = _cache_folder() / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() or os.access(target.parent, os.W_OK):
            return target if target.exists() else _compile(compiler, folder / SOURCES[0], target)
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written to
        logger.info("the C forms cannot be kept for the next start: %s", error)
    return _compile(compiler, folder / SOURCES[0], Path(tempfile.mkdtemp(prefix="specdec-")) / name)


def _compile(compiler: str, source: Path, target: Path) -> Path:
    # Written beside its place and moved there whole, so that processes starting together see no half of it.
    handle, draft = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        command = [*compiler.split(), *FLAGS, str(source), "-o", draft, "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
        os.replace(draft, target)
    finally:
        Path(draft).unlink(missing_ok=True)
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
