"""Compilation targets of the C kernels, and the choice for this processor."""

import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "SPECDEC_MARCH"
"""Environment variable for a target of the table, or any other value for the compiler's -march."""


@dataclass(frozen=True, slots=True)
class CompileTarget:
    name: str
    title: str
    """Human-readable description."""
    machine: str | None
    """Architecture as in `platform.machine()`; None: any."""
    needs: tuple[str, ...]
    """Required processor features, by Linux's names."""
    flags: tuple[str, ...]
    """Compiler flags."""


_QUICK = "-O2"
"""For targets without integer product instructions: -O3 takes a compiler up to 37 s there, -O2 7 s."""


def _x86(name: str, title: str, needs: tuple[str, ...], *flags: str) -> CompileTarget:
    """Return an x86 target with one flag per feature: older compilers lack names for the combinations."""
    features = (f"-m{feature.replace('amx_', 'amx-').replace('_', '')}" for feature in needs)
    return CompileTarget(name, title, "x86_64", needs, (*features, *flags))


_AVX2 = ("sse2", "avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_AMX = (*_BF16, "amx_tile", "amx_int8", "amx_bf16")

NATIVE = CompileTarget(
    "native", "whatever the compiler takes this processor for", None, (), ("-march=native",)
)
TARGETS = (
    _x86("amx", "AVX-512 with bfloat16 and matrix units", _AMX),
    _x86("avx512-bf16", "AVX-512 with bfloat16 units", _BF16),
    _x86("avx512-vnni", "AVX-512 with VNNI", _VNNI),
    _x86("avx512", "AVX-512", _AVX512),
    _x86("avx2-vnni", "AVX2 with VNNI", (*_AVX2, "avx_vnni")),
    _x86("avx2", "AVX2", _AVX2),
    _x86("x86-64", "any x86-64", ("sse2",), _QUICK),
    CompileTarget(
        *("neon-i8mm", "NEON with matrix units for bytes, and bfloat16", "aarch64"),
        ("asimd", "asimddp", "bf16", "i8mm"),
        ("-march=armv8.2-a+dotprod+bf16+i8mm",),
    ),
    CompileTarget(
        *("neon-bf16", "NEON with dot products and bfloat16", "aarch64", ("asimd", "asimddp", "bf16")),
        ("-march=armv8.2-a+dotprod+bf16",),
    ),
    CompileTarget(
        *("neon-dot", "NEON with dot products", "aarch64", ("asimd", "asimddp")),
        ("-march=armv8.2-a+dotprod",),
    ),
    CompileTarget("neon", "NEON", "aarch64", ("asimd",), ("-march=armv8-a", _QUICK)),
    NATIVE,
)
"""Best first: the first one that the processor supports and the compiler can build is used.

The last is for processors missing from the table and systems that do not list their features.
"""
BEYOND = frozenset(
    {"avx512_fp16", "amx_fp16", "avx_vnni_int8", "avx_ne_convert", "sve", "sve2", "svebf16", "sme"}
)
"""Features that would speed up products but that no target uses."""


def candidates() -> tuple[CompileTarget, ...]:
    """Return possible targets, best first: the one that the user names, or all that can run here."""
    if requested := os.environ.get(VARIABLE):
        target = named(requested)
        if missing := set(target.needs) - features() if target.needs else ():
            logger.warning(
                "%s=%s needs %s, which this processor lacks", VARIABLE, requested, ", ".join(sorted(missing))
            )
            return ()
        return (target,)
    available, machine = features(), platform.machine()
    return tuple(x for x in TARGETS if x.machine in (None, machine) and available.issuperset(x.needs))


def named(name: str) -> CompileTarget:
    """Return the named target; any other name is passed to the compiler's -march."""
    other = CompileTarget(name, f"-march={name}", None, (), (f"-march={name}",))
    return next((target for target in TARGETS if target.name == name), other)


def unused(target: CompileTarget) -> list[str]:
    """List the processor's product features that this target of the table does not use."""
    better = TARGETS[: TARGETS.index(target)] if target in TARGETS and target.needs else None
    if better is None:
        return []
    known = BEYOND.union(*(other.needs for other in better))
    return sorted(known & features() - set(target.needs))


def features() -> frozenset[str]:
    """Return the processor's features; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())
