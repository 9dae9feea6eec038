"""Parameters of a Mamba-2 layer between its projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MambaLayer:
    groups: int
    heads: int
    state_dim: int
    head_dim: int
    conv_CK: Tensor
    conv_C: Tensor | None
    A_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    step_limit: tuple[float, float]
    """Bounds on the step size after softplus."""
    norm_N: Tensor | None
    """Weight of the gated output norm. None: the output is gated but not normalised."""
    eps: float
    gate_first: bool = True
    """Gate before the norm; False: after it."""

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Columns of B (keys) or of C (queries), which the heads of a group share."""
        return self.groups * self.state_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of the gate, of x, B and C together, and of dt, in the order of the projection."""
        return self.inner, self.inner + 2 * self.shared, self.heads
