"""The drafter interface, for model heads and text look-ups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdec.config.tenant import SOLE, Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.proposal import DraftShape, Proposal
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.slots import RequestId


class SequenceMemory(Protocol):
    """A sequence's part of the arena: its block table, and its committed state if the model has states."""

    @property
    def table_N(self) -> Tensor: ...

    @property
    def committed(self) -> CommittedState | None: ...


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that may get a draft. `tokens` ends with the root; its block table has capacity for it."""

    key: RequestId
    prompt_length: int
    tokens: Sequence[int]
    table_N: Tensor
    shape: DraftShape | None
    tenant: Tenant = SOLE
    sampler: object = None
    """Sampler of the sequence's tokens: used where guesses are ranked, not by drafters."""
    memory: SequenceMemory | None = None
    """Set for drafters that read the target's KV cache and states."""


class Drafter(Protocol):
    calibrator: Calibrator

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return one proposal per sequence."""
        ...

    def on_preempt(self, key: RequestId) -> None:
        """Drop data stored in the sequence's blocks: it was preempted and will be prefilled again."""
        ...

    def end(
        self, key: RequestId, prompt: Sequence[int], output: Sequence[int] | None, tenant: Tenant
    ) -> None:
        """Drop a sequence. `output` belongs to its tenant, and is None unless the sequence finished."""
        ...

    def flush(self, caller: str | None = None) -> None:
        """Drop data left by finished sequences: all of it, or one caller's."""
        ...

    def forget(self) -> None:
        """Drop all sequences and texts, including unfinished ones; calibration is kept."""
        ...


class StatelessDrafter:
    """Default no-op methods for drafters without per-sequence state."""

    def on_preempt(self, key: RequestId) -> None: ...

    def end(
        self, key: RequestId, prompt: Sequence[int], output: Sequence[int] | None, tenant: Tenant
    ) -> None: ...

    def flush(self, caller: str | None = None) -> None: ...

    def forget(self) -> None: ...
