"""RMS normalisation, as a config describes it and as it is loaded."""

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
    """The product with the weight is rounded once; otherwise x is, to the model's dtype, before it too."""

    def load(self, weights: Weights, name: str, size: int) -> Tensor:
        """Load the weight with the offset added, so that every norm multiplies by one vector.

        Its dtype says where the norm rounds: float32 for one that is wide, else the model's.
        """
        return weights.take(name, (size,), torch.float32 if self.wide else None) + self.offset
