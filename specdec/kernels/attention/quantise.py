"""What pages of 8 bits hold of keys and values.

A token's key is one number, whether the window that wrote it reads it or a later one: everything that attends
reads the pages, never what was rounded into them. So drafts cannot change the text here either.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""What ends the range of FP8: it knows no infinity, and larger numbers would be none."""


def quantise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest number that the pages hold; 8 bits, without a scale, end at 448."""
    return x.clamp(-LARGEST, LARGEST).to(FP8) if dtype == FP8 else x
