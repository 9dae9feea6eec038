"""How fast this machine reads memory, as a benchmark finds it while it runs."""

import time
from pathlib import Path

import torch

PROBE_BYTES = 1 << 30
"""More than any cache holds."""


class BandwidthProbe:
    """Read one large tensor with every thread that torch has."""

    def __init__(self, device: torch.device, num_bytes: int = PROBE_BYTES) -> None:
        # Written once, or the system would back every page with the same zeros.
        self.data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)

    def bytes_per_second(self) -> float:
        """Take one pass; a sum writes nothing back, and the read of its result waits for the device."""
        start_s = time.perf_counter()
        self.data.sum().item()
        return self.data.nbytes / (time.perf_counter() - start_s)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the cache nearest to memory; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [
        path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((int(size.removesuffix("K")) << 10 for size in sizes), default=0)
