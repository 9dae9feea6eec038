"""When tokens that differ are wrong: where numbers are exact. Elsewhere two right answers differ often."""

import torch

from specdec.setup.resolve import Resolved

EXACT = (torch.float32, torch.float64)


def rounding(settings: Resolved, *, stored_narrow: bool = False) -> str:
    """Name what rounds so coarsely that a difference is shown and not refused; empty where nothing does.

    `stored_narrow` says that the checkpoint was published in eight bits: others multiply them differently.
    """
    found = [] if settings.dtype in EXACT else [str(settings.dtype).removeprefix("torch.")]
    if settings.quantize or stored_narrow:
        found.append("8-bit weights")
    if settings.layout.kv_dtype is not None:
        found.append("8-bit keys and values")
    return " and ".join(found)
