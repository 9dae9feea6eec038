"""RMS normalisation: its config and loading its weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS normalisation that multiplies by `offset + weight`."""

    eps: float
    offset: float = 0.0
    wide: bool = True
    """Round once, after the product with the weight; False: also round x to the model's dtype before it."""

    def load(self, weights: Weights, name: str, size: int) -> Tensor:
        """Load the weight with the offset added, so that every norm multiplies by one vector.

        Its dtype determines where the norm rounds: float32 if wide, else the model's dtype.
        """
        return weights.take(name, (size,), torch.float32 if self.wide else None) + self.offset
