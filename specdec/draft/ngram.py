"""Prompt look-up: propose what followed the latest tokens where they occurred before in the request."""

from collections.abc import Hashable, Sequence

from specdec.config.tenant import SOLE, Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.continuations import grow_tree
from specdec.draft.history import History
from specdec.draft.proposal import Proposal, Shape

MAX_PLACES = 16
"""How many earlier places a tree may be made of, the latest first."""


class NgramDrafter:
    """Draft by n-grams of each request's own tokens, the longest match first.

    Matches have 4 tokens down to 2. vLLM documents at most 4 (its default, 5 and nothing shorter, misses much
    of a short text); SGLang goes down to 1. A single token is met again so often, and followed by the same
    so rarely, that it costs more to verify than it earns; where verification is cheap, set
    `min_length=1`.
    """

    def __init__(
        self, *, max_length: int = 4, min_length: int = 2, calibrator: Calibrator | None = None
    ) -> None:
        assert 1 <= min_length <= max_length
        self.calibrator = calibrator or Calibrator()
        self._lengths = range(min_length, max_length + 1)
        self._texts: dict[Hashable, History] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def begin(self, key: Hashable, tokens: Sequence[int], tenant: Tenant = SOLE) -> None:
        """Take a request in, with its prompt. It stays until `end`, preempted or not."""
        assert key not in self._texts
        self._texts[key] = History(self._lengths, depth=max(self._lengths))
        self._texts[key].extend(tokens)

    def extend(self, key: Hashable, tokens: Sequence[int]) -> None:
        """Append what a request gained."""
        self._texts[key].extend(tokens)

    def end(self, key: Hashable) -> None:
        """Forget a request."""
        del self._texts[key]

    def forget(self) -> None:
        """Forget every request."""
        self._texts.clear()

    def share(self, output: Sequence[int], tenant: Tenant = SOLE) -> None:
        """Keep nothing: each request is drafted for from its own tokens."""

    def flush(self, caller: str | None = None) -> None:
        """Do nothing: what has ended left nothing."""

    def propose(self, key: Hashable, shape: Shape) -> Proposal:
        """Propose what followed the latest earlier place, and with `topk` above 1 the others' branches."""
        text = self._texts[key]
        context = text.tokens[-text.depth :]
        length, places = text.search(context, most=1 if shape.topk == 1 else MAX_PLACES)
        return grow_tree(
            context[-1],
            [text.continuation(place, shape.num_steps) for place in places],
            matched=length,
            shape=shape,
            believe=believe_the_latest,
            calibrator=self.calibrator,
        )


def believe_the_latest(counts: Sequence[int], matched: int) -> list[float]:
    """Believe the latest follower the more the longer the match, and each further one where those failed."""
    chance = matched / (matched + 3)
    return [chance * (1 - chance) ** rank for rank in range(len(counts))]
