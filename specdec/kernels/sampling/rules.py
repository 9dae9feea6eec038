"""Sampling rules of each row of logits. A part that no row uses is None and costs nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

NO_TOKEN = -1
"""Result for a row whose scores contain NaN; also the padding of windows."""


class Bias(NamedTuple):
    """Add `value` to tokens (int32) of some rows: the next `length_R[r]` entries belong to row `row_R[r]`.

    Rows are distinct, and so are the tokens of a row.
    """

    row_R: Tensor
    length_R: Tensor
    token_E: Tensor
    value_E: Tensor

    @property
    def at(self) -> tuple[Tensor, Tensor]:
        """Return the row and token indices of each entry."""
        return _spread(self.row_R, self), self.token_E.long()


class Penalties(NamedTuple):
    """Penalise tokens (int32) of some rows: the next `length_R[r]` entries belong to row `row_R[r]`.

    Each token occurs in the row's prompt or output (repetition), `count` times in its output (presence and
    frequency). Rows are distinct, and so are the tokens of a row.
    """

    row_R: Tensor
    length_R: Tensor
    token_E: Tensor
    count_E: Tensor
    repetition_R: Tensor
    presence_R: Tensor
    frequency_R: Tensor

    @property
    def at(self) -> tuple[Tensor, Tensor]:
        """Return the row and token indices of each entry."""
        return _spread(self.row_R, self), self.token_E.long()

    @property
    def factors(self) -> list[Tensor]:
        """Return repetition, presence and frequency of each entry."""
        return [_spread(column_R, self) for column_R in self[4:]]


def _spread(column_R: Tensor, entries: "Bias | Penalties") -> Tensor:
    """Repeat each row's value for its entries, without synchronising with a GPU."""
    return column_R.repeat_interleave(entries.length_R, output_size=len(entries.token_E))


class Mask(NamedTuple):
    """Cut all tokens v of row `row_R[r]` except those with bit v % 32 set in word v // 32 (int32).

    Row r uses the words of set `set_R[r]`: rows with the same allowed tokens share a set.
    """

    row_R: Tensor
    set_R: Tensor
    words_KW: Tensor


class RowRule(NamedTuple):
    """One row's sampling parameters, each a column of Rules; the defaults disable them."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_filtered(self) -> bool:
        """Return whether any filter applies besides the temperature."""
        return self.temperature > 0 and self[1:] != type(self)()[1:]


COLUMNS = tuple(f"{name}_N" for name in RowRule._fields)


def make_column(values: Sequence[float], device: torch.device) -> Tensor:
    """Make a column: int64 of integers, else float32, regardless of torch's default dtype."""
    dtype = torch.int64 if isinstance(values[0], int) else torch.float32
    return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Rules:
    """Sampling rules of N rows; top_k 0, top_p 1 and min_p 0 are off.

    At temperature 0 only bias, penalties and mask apply.
    """

    temperature_N: Tensor
    top_k_N: Tensor | None = None
    top_p_N: Tensor | None = None
    min_p_N: Tensor | None = None
    bias: Bias | None = None
    penalties: Penalties | None = None
    mask: Mask | None = None

    @classmethod
    def of(
        cls,
        columns: Iterable[Tensor | None],
        *,
        bias: Bias | None = None,
        penalties: Penalties | None = None,
        mask: Mask | None = None,
    ) -> Self:
        """Build rules from columns in the order of RowRule."""
        named: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
        return cls(**named, bias=bias, penalties=penalties, mask=mask)

    @property
    def filters(self) -> tuple[Tensor | None, ...]:
        """Return the columns except the temperature, in the order of RowRule."""
        return tuple(getattr(self, name) for name in COLUMNS[1:])

    @property
    def is_uniform(self) -> bool:
        """Return whether all tokens are treated alike, apart from their logits."""
        return self.bias is None and self.penalties is None and self.mask is None
