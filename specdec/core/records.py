"""What drafts have earned: a record for each request, which starts from that of all that choose alike."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

from specdec.config.sampling import SamplingParams
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


class Records:
    """Owns the records of requests and of their kinds."""

    def __init__(self) -> None:
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

    def end(self, request: Request) -> None:
        """Forget a request; its kind's record keeps what it came to."""
        self._requests.pop(request.number, None)

    def forget_requests(self) -> None:
        """Forget all requests."""
        self._requests.clear()

    def kinds(self) -> dict[int, TrackRecord]:
        """Copy what is known of each kind."""
        return deepcopy(self._kinds)

    def recall(self, kinds: Mapping[int, TrackRecord]) -> None:
        """Replace everything known by this."""
        self._kinds = deepcopy(dict(kinds))
        self._requests.clear()


def _kind(params: SamplingParams) -> int:
    """Classify requests by how their acceptance compares: 0 greedy, 1 nearly greedy, 2 sampled."""
    return 0 if params.temperature == 0 else 1 if params.temperature <= NEARLY_GREEDY else 2
