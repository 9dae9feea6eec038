"""How each row of logits is to be processed. A part that no row uses is None, and costs nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

NO_TOKEN = -1
"""What is chosen where what is compared holds no number; and what fills a window up."""


class Bias(NamedTuple):
    """Add `value` to tokens (int32) of some rows: the next `length_R[r]` entries belong to row `row_R[r]`.

    No row is named twice, and no token of a row.
    """

    row_R: Tensor
    length_R: Tensor
    token_E: Tensor
    value_E: Tensor

    @property
    def at(self) -> tuple[Tensor, Tensor]:
        """Return the row and the token of each entry, by which torch indexes."""
        return _spread(self.row_R, self), self.token_E.long()


class Penalties(NamedTuple):
    """Penalise tokens (int32) of some rows: the next `length_R[r]` entries belong to row `row_R[r]`.

    The row's prompt or output holds each token (repetition), the output `count` times (the others). No row is
    named twice, and no token of a row.
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
        """Return the row and the token of each entry, by which torch indexes."""
        return _spread(self.row_R, self), self.token_E.long()

    @property
    def factors(self) -> list[Tensor]:
        """Return repetition, presence and frequency of each entry."""
        return [_spread(column_R, self) for column_R in self[4:]]


def _spread(column_R: Tensor, own: "Bias | Penalties") -> Tensor:
    """Repeat each row's value for its entries, without asking a GPU how many there are."""
    return column_R.repeat_interleave(own.length_R, output_size=len(own.token_E))


class Mask(NamedTuple):
    """Cut of row `row_R[r]` all tokens v but those whose bit v % 32 is set in word v // 32 (int32).

    The words are those of set `set_R[r]`: rows that allow the same share them.
    """

    row_R: Tensor
    set_R: Tensor
    words_KW: Tensor


class RowRule(NamedTuple):
    """The numbers by which one row's tokens are chosen, each a column of Rules; the defaults switch off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_filtered(self) -> bool:
        """Return whether more than the temperature counts."""
        return self.temperature > 0 and self[1:] != type(self)()[1:]


COLUMNS = tuple(f"{name}_N" for name in RowRule._fields)


def make_column(values: Sequence[float], device: torch.device) -> Tensor:
    """Make a column of numbers of one kind: int64 of whole ones, else float32, whatever the default is."""
    dtype = torch.int64 if isinstance(values[0], int) else torch.float32
    return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Rules:
    """Temperature 0 leaves a row at bias, penalties and mask; top_k 0, top_p 1 and min_p 0 are off."""

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
        """Make rules of columns in the order of RowRule."""
        named: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
        return cls(**named, bias=bias, penalties=penalties, mask=mask)

    @property
    def filters(self) -> tuple[Tensor | None, ...]:
        """Return the columns beside the temperature, in the order of RowRule."""
        return tuple(getattr(self, name) for name in COLUMNS[1:])

    @property
    def is_uniform(self) -> bool:
        """Return whether they treat all tokens alike but for their logits."""
        return self.bias is None and self.penalties is None and self.mask is None
