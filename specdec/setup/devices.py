"""Device selection and free memory."""

import os
from pathlib import Path

import torch

from specdec.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """Return the device, or raise if it does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device: {name!r} was asked for, but torch finds no CUDA device; use device='cpu' or install a "
            "CUDA build of torch.",
            field="device",
        )
    # With its index, as tensors report their device and torch.cuda.set_device expects it.
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def free_memory(device: torch.device) -> int:
    """Return free bytes of the device; on a CPU within the limit of the process's control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, StopIteration, ValueError):  # not on this system, or no limit ("max")
        pass
    return max(free, 0)
