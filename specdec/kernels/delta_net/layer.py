"""The parameters of one layer: a gated delta net between its projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_CK: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    norm_W: Tensor
    eps: float
    beta_scale: float = 1.0
    """Of the write strength: 2 lets the state's eigenvalues be negative."""

    @property
    def widths(self) -> tuple[int, int, int, int, int, int]:
        """Columns of q, k, v, z, b and a, in the order of the projection."""
        key, value = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return key, key, value, value, self.value_heads, self.value_heads
