"""Prompt look-up: propose the tokens that followed earlier occurrences of the last n-gram."""

from collections.abc import Sequence

from specdec.config.tenant import Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.continuations import grow_tree
from specdec.draft.history import TokenHistory
from specdec.draft.lookup import LookupDrafter
from specdec.draft.proposal import DraftShape, Proposal

MAX_PLACES = 16
"""Maximum occurrences that form a tree, the latest first."""


class NgramDrafter(LookupDrafter):
    """Draft by n-grams of each request's own tokens, the longest match first.

    Matches are 2 to 4 tokens long. vLLM documents at most 4 (its default, 5 and nothing shorter, misses much
    of a short text); SGLang goes down to 1. A single token recurs so often, and is so rarely followed by the
    same token, that it costs more to verify than it gains. Where verification is cheap, set `min_length=1`.
    """

    def __init__(
        self, *, max_length: int = 4, min_length: int = 2, calibrator: Calibrator | None = None
    ) -> None:
        assert 1 <= min_length <= max_length
        super().__init__(range(min_length, max_length + 1), max_length, calibrator)

    def continue_text(self, text: TokenHistory, shape: DraftShape, tenant: Tenant) -> Proposal:
        """Propose what followed the latest occurrence, and branches from older ones if `topk` is above 1."""
        context = text.tokens[-text.depth :]
        length, starts = text.search(context, most=1 if shape.topk == 1 else MAX_PLACES)
        return grow_tree(
            context[-1],
            [text.continuation(start, shape.num_steps) for start in starts],
            matched=length,
            shape=shape,
            believe=believe_the_latest,
            calibrator=self.calibrator,
        )


def believe_the_latest(counts: Sequence[int], matched: int) -> list[float]:
    """Return probabilities that grow with the match length and fall geometrically with age."""
    chance = matched / (matched + 3)
    return [chance * (1 - chance) ** rank for rank in range(len(counts))]
