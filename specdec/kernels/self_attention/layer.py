"""Parameters of an attention layer between its projections."""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [T, R] of a group's positions."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    gated: bool
    """The projection holds [query | gate] per head; the output is multiplied by the gate's sigmoid."""
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    _: KW_ONLY
    wide_rotation: bool = False
    """Rotate heads in float32 and round once; False: round each product."""
    window: int | None = None
    """Sliding window in tokens of the path, including the token itself. None: all tokens."""
    value_dim: int | None = None
    """Trailing entries of a key that are its value. None: values are projected, as wide as keys."""

    def __post_init__(self) -> None:
        assert self.value_dim is None or not self.gated, "a gate is as wide as a query"

    @property
    def widths(self) -> list[int]:
        """Columns of the queries (with their gates), keys and values, in the order of the projection."""
        kv = self.kv_heads * self.head_dim
        values = kv if self.value_dim is None else 0
        return [self.heads * self.head_dim * (2 if self.gated else 1), kv, values]
