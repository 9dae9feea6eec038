"""Mamba-1's recurrence over a window, a tile of channels at a time: the state of a chain stays on the chip."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.conv.triton import fold_window
from specdec.kernels.gates.triton import softplus
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.selective_scan.layer import SelectiveLayer

CHANNELS = 64
"""Of a tile."""
