"""Draft acceptance per request, starting from the statistics of requests with similar sampling."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from specdec.config.sampling import SamplingParams
from specdec.core.draft_record import DraftRecord
from specdec.core.request import Request
from specdec.draft.acceptance import TrackRecord
from specdec.draft.calibration import AcceptanceTally
from specdec.draft.worth import DraftWorth

NEARLY_GREEDY = 0.5
"""Maximum temperature that counts as nearly greedy, where acceptance is close to greedy acceptance."""


@dataclass(frozen=True, slots=True)
class AcceptanceSnapshot:
    """A copy of the acceptance statistics of an engine and its drafters."""

    kinds: dict[int, TrackRecord]
    tallies: tuple[list[list[AcceptanceTally]], ...]
    worth: DraftWorth


class AcceptanceStats:
    """Owns the track records of requests and sampling kinds, and the draft records of the current step."""

    def __init__(self) -> None:
        self.gained = 0
        """Tokens emitted beyond one per request in the current step."""
        self._drafted: dict[int, DraftRecord] = {}
        self._kinds: dict[int, TrackRecord] = {}
        self._requests: dict[int, TrackRecord] = {}

    def __len__(self) -> int:
        """Return the number of requests with a record."""
        return len(self._requests)

    def of(self, request: Request) -> TrackRecord:
        """Return a request's track record, which starts from that of its kind."""
        if request.number not in self._requests:
            kind_record = self._kinds.setdefault(_kind(request.params), TrackRecord())
            self._requests[request.number] = TrackRecord(kind_record)
        return self._requests[request.number]

    def begin_step(self) -> None:
        """Clear the last step's draft records."""
        self._drafted.clear()
        self.gained = 0

    def note(self, request: Request, record: DraftRecord | None) -> None:
        """Record the draft to be verified for a request; None: there is nothing to learn."""
        self._drafted.pop(request.number, None)
        if record:
            self._drafted[request.number] = record

    def learn(self, request: Request, emitted: Sequence[int]) -> Sequence[bool]:
        """Update from a step's proposals, verified or not, and the emitted tokens.

        Return for each emitted token whether only finished requests' outputs had proposed it.
        """
        record = self._drafted.get(request.number)
        self.gained += len(emitted) - 1
        if record is None:
            return ()
        for drafter, proposal in record.parts:
            judged = proposal.above(len(emitted))
            drafter.calibrator.observe(judged, judged.tree.follow(emitted))
        if record.shape:
            # A look-up may go deeper than the planned shape; the excess is not credited to the shape.
            judged = record.merged.above(min(record.shape.num_steps, len(emitted)))
            depth, followed = max(judged.tree.depths), len(judged.tree.follow(emitted)) - 1
            self.of(request).observe(record.shape, depth, followed)
        return record.shared(emitted)

    def end(self, request: Request) -> None:
        """Drop a request's record; its kind's record remains."""
        self._requests.pop(request.number, None)

    def forget_requests(self) -> None:
        """Drop all requests, including unfinished ones."""
        self._requests.clear()
        self._drafted.clear()

    def kinds(self) -> dict[int, TrackRecord]:
        """Return a copy of the records of each kind."""
        return deepcopy(self._kinds)

    def recall(self, kinds: Mapping[int, TrackRecord]) -> None:
        """Replace all records by these."""
        self._kinds = deepcopy(dict(kinds))
        self.forget_requests()


def _kind(params: SamplingParams) -> int:
    """Return the sampling kind: 0 greedy, 1 nearly greedy, 2 sampled."""
    return 0 if params.temperature == 0 else 1 if params.temperature <= NEARLY_GREEDY else 2
