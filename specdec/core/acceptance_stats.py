"""What drafts have earned: statistics of each request, which start from those of all that sample alike."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from specdec.config.sampling import SamplingParams
from specdec.core.draft_record import DraftRecord
from specdec.core.request import Request
from specdec.draft.acceptance import TrackRecord
from specdec.draft.calibration import Tally
from specdec.draft.worth import Worth

NEARLY_GREEDY = 0.5
"""A temperature up to which drafts are accepted nearly as often as without any."""


@dataclass(frozen=True, slots=True)
class Experience:
    """What was accepted so far, as an engine and its drafters remember it."""

    kinds: dict[int, TrackRecord]
    tallies: tuple[list[list[Tally]], ...]
    worth: Worth


class AcceptanceStats:
    """Owns the track records of requests and of their kinds, and what was drafted in the current step."""

    def __init__(self) -> None:
        self.gained = 0
        """Drafted tokens that the current step's requests have taken."""
        self._drafted: dict[int, DraftRecord] = {}
        self._kinds: dict[int, TrackRecord] = {}
        self._requests: dict[int, TrackRecord] = {}

    def __len__(self) -> int:
        """Count the requests that have a record."""
        return len(self._requests)

    def of(self, request: Request) -> TrackRecord:
        """Return what drafts have earned for a request."""
        if request.number not in self._requests:
            alike = self._kinds.setdefault(_kind(request.params), TrackRecord())
            self._requests[request.number] = TrackRecord(alike)
        return self._requests[request.number]

    def begin_step(self) -> None:
        """Forget what the last step drafted."""
        self._drafted.clear()
        self.gained = 0

    def note(self, request: Request, record: DraftRecord | None) -> None:
        """Note what was drafted for a request and is verified; None: nothing to learn from."""
        self._drafted.pop(request.number, None)
        if record:
            self._drafted[request.number] = record

    def learn(self, request: Request, emitted: Sequence[int]) -> Sequence[bool]:
        """Compare what was proposed, verified or not, with the tokens that came.

        Return for each of these whether only finished requests' outputs had it.
        """
        asked = self._drafted.get(request.number)
        self.gained += len(emitted) - 1
        if asked is None:
            return ()
        for drafter, proposal in asked.parts:
            judged = proposal.above(len(emitted))
            drafter.calibrator.observe(judged, judged.tree.follow(emitted))
        if asked.shape:
            # What was looked up may go deeper than was planned: that is no merit of a draft in this shape.
            judged = asked.merged.above(min(asked.shape.num_steps, len(emitted)))
            depth, followed = max(judged.tree.depths), len(judged.tree.follow(emitted)) - 1
            self.of(request).observe(asked.shape, depth, followed)
        return asked.shared(emitted)

    def end(self, request: Request) -> None:
        """Forget a request; its kind's record keeps what it came to."""
        self._requests.pop(request.number, None)

    def forget_requests(self) -> None:
        """Forget all requests, whatever was half done."""
        self._requests.clear()
        self._drafted.clear()

    def kinds(self) -> dict[int, TrackRecord]:
        """Copy what is known of each kind."""
        return deepcopy(self._kinds)

    def recall(self, kinds: Mapping[int, TrackRecord]) -> None:
        """Replace everything known by this."""
        self._kinds = deepcopy(dict(kinds))
        self.forget_requests()


def _kind(params: SamplingParams) -> int:
    """Classify requests by how their acceptance compares: 0 greedy, 1 nearly greedy, 2 sampled."""
    return 0 if params.temperature == 0 else 1 if params.temperature <= NEARLY_GREEDY else 2
