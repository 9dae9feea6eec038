"""The parameters of Mamba-1's recurrence."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SelectiveLayer:
    """Mamba has one head of all channels; Zamba's channels are parted into heads with keys of their own."""

    A_HKW: Tensor
    """How fast each entry of a state decays: what is held is negative, and float32."""
    D_HW: Tensor
    """What of its input a channel passes on."""
    dt_bias_HW: Tensor
    """Added to Δ before its softplus."""
