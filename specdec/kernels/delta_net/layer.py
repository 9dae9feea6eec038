"""Parameters of a gated delta net layer between its projections."""

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
    """[H], or [H, K] for a decay vector over the keys."""
    norm_W: Tensor
    eps: float
    beta_scale: float = 1.0
    """Factor of the write strength; 2 allows negative eigenvalues of the state's transition."""
    bound: float | None = None
    """Lower bound of log-decays; None: -e^A softplus is unbounded."""
    sigmoid: bool = False
    """Gate the output with a sigmoid instead of silu."""

    @property
    def widths(self) -> tuple[int, int, int, int, int, int]:
        """Columns of q, k, v, z, b and a, in the order of the projection."""
        key, value = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return key, key, value, value, self.value_heads, self.dt_bias_H.numel()
