"""Parameters of Mamba-1's recurrence."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SelectiveLayer:
    """Mamba has one head of all channels; Zamba splits them into heads with their own keys."""

    A_HKW: Tensor
    """Decay rate of each state entry; negative, float32."""
    D_HW: Tensor
    """Skip weight of each channel's input."""
    dt_bias_HW: Tensor
    """Added to Δ before its softplus."""
