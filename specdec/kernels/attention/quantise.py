"""Quantise keys and values for FP8 pages.

Attention always reads the quantised pages, also for the window that wrote them, never the unrounded inputs.
So a token's key is the same number in every window, and drafts cannot change the output.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest finite FP8 value. The format has no infinity: larger numbers would become NaN."""


def quantise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the pages' dtype; FP8 has no scale and saturates at 448."""
    return x.clamp(-LARGEST, LARGEST).to(FP8) if dtype == FP8 else x
