"""Measure how fast memory is read, and find the size of the cache above it."""

import time
from pathlib import Path

import torch

PROBE_BYTES = 1 << 30
"""Larger than any cache."""


class BandwidthProbe:
    """Read one large tensor with all of torch's threads."""

    def __init__(self, device: torch.device, num_bytes: int = PROBE_BYTES) -> None:
        # Written once, as the system would otherwise back every page with the same zeros.
        self.data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)

    def bytes_per_second(self) -> float:
        """Sum the tensor: this writes nothing back, and reading the result waits for the device."""
        start_s = time.perf_counter()
        self.data.sum().item()
        return self.data.nbytes / (time.perf_counter() - start_s)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [
        path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((int(size.removesuffix("K")) << 10 for size in sizes), default=0)
