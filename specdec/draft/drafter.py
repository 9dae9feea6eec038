"""What the loop asks of a drafter, be it a head of the model or a look-up in text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdec.config.tenant import SOLE, Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.proposal import Proposal, Shape
from specdec.state_slots.backing import Committed
from specdec.state_slots.slots import RequestId


class Memory(Protocol):
    """What a sequence holds of the arena: blocks, and what it has committed, if its model keeps states."""

    @property
    def table_N(self) -> Tensor: ...

    @property
    def committed(self) -> Committed | None: ...


@dataclass(frozen=True, slots=True)
class Want:
    """One sequence that may get a draft. `tokens` ends with the root; its block table has room for the draft.

    Without a shape nothing is proposed, and the drafter only catches up with the sequence.
    """

    key: RequestId
    prompt_length: int
    tokens: Sequence[int]
    table_N: Tensor
    shape: Shape | None
    tenant: Tenant = SOLE
    sampler: object = None
    """By what its tokens will be chosen: for what ranks guesses to read, and for no drafter."""
    memory: Memory | None = None
    """For a drafter that reads what the target does."""


class Drafter(Protocol):
    calibrator: Calibrator

    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        """Propose what may follow each sequence."""
        ...

    def on_preempt(self, key: RequestId) -> None:
        """Drop what lies in a sequence's memory: it was preempted, and is prefilled anew."""
        ...

    def end(
        self, key: RequestId, prompt: Sequence[int], output: Sequence[int] | None, tenant: Tenant
    ) -> None:
        """Forget a sequence; its output, which is its tenant's, is None unless it came to its end."""
        ...

    def flush(self, caller: str | None = None) -> None:
        """Forget what sequences that have ended left: all, or one caller's."""
        ...

    def forget(self) -> None:
        """Forget every sequence and every text, whatever was half done; what was learnt of drafts stays."""
        ...


class Stateless:
    """The part of a drafter that keeps nothing of any sequence; a subclass overrides what it does keep."""

    def on_preempt(self, key: RequestId) -> None: ...

    def end(
        self, key: RequestId, prompt: Sequence[int], output: Sequence[int] | None, tenant: Tenant
    ) -> None: ...

    def flush(self, caller: str | None = None) -> None: ...

    def forget(self) -> None: ...
