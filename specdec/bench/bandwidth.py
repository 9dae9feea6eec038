"""How fast this machine reads memory, as a benchmark finds it while it runs."""

import time

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
