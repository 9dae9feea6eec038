"""Suffix decoding (Oliaro et al.): propose the most frequent continuations of the longest match."""

from collections.abc import Sequence

from specdec.config.tenant import SOLE, Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.continuations import grow_tree
from specdec.draft.history import TokenHistory
from specdec.draft.lookup import LookupDrafter
from specdec.draft.output_store import OutputStore
from specdec.draft.proposal import DraftShape, Proposal
from specdec.state_slots.slots import RequestId

NGRAMS = (1, 2, 4, 8, 16)
"""Indexed n-gram lengths; a match may have any length."""
MAX_PLACES = 128
"""Maximum occurrences counted, the latest first."""


class SuffixDrafter(LookupDrafter):
    """Draft by continuation counts of the longest match in a request and its tenant's earlier outputs.

    The suffix tree is implicit: its node for a context is the list of positions where the context ended,
    found by an n-gram index, and its children are the tokens that followed. A token costs about 100 bytes
    instead of a path of nodes, an old output is evicted by cutting off the front of a list, and only visited
    nodes are built. Counts cover the latest `MAX_PLACES` occurrences.

    Outputs of finished requests are stored up to `max_shared_tokens`, each only for its own tenant.
    """

    def __init__(
        self,
        *,
        max_depth: int = 64,
        max_shared_tokens: int = 1 << 17,
        length_factor: float = 2.0,
        calibrator: Calibrator | None = None,
    ) -> None:
        assert max_depth >= max(NGRAMS) and max_shared_tokens >= 2 and length_factor > 0
        super().__init__(NGRAMS, max_depth, calibrator)
        self.length_factor = length_factor
        """Maximum draft depth, in multiples of the match length."""
        self._outputs = OutputStore(NGRAMS, max_depth, max_shared_tokens)

    def share(self, output: Sequence[int], tenant: Tenant = SOLE) -> None:
        """Add an output for later requests of the tenant."""
        self._outputs.add(output, tenant)

    def end(
        self,
        key: RequestId,
        prompt: Sequence[int] = (),
        output: Sequence[int] | None = None,
        tenant: Tenant = SOLE,
    ) -> None:
        """Drop a sequence; a finished output is stored for its tenant's later requests."""
        super().end(key)
        if output:
            self.share(output, tenant)

    def flush(self, caller: str | None = None) -> None:
        """Drop outputs of finished requests: all, or one caller's."""
        self._outputs.flush(caller)

    def continue_text(self, text: TokenHistory, shape: DraftShape, tenant: Tenant) -> Proposal:
        """Propose the likeliest continuations of the longest match in this text or the tenant's outputs."""
        context = text.tokens[-text.depth :]
        texts = (text, *self._outputs.of(tenant))
        matches = [(history, *history.search(context, MAX_PLACES)) for history in texts]
        matched = max(length for _, length, _ in matches)
        num_steps = min(shape.num_steps, max(int(self.length_factor * matched), 1))
        longest = [(history, starts) for history, length, starts in matches if length == matched]
        return grow_tree(
            context[-1],
            [history.continuation(start, num_steps) for history, starts in longest for start in starts],
            matched=matched,
            shape=shape,
            believe=believe_the_counts,
            calibrator=self.calibrator,
            shared=sum(len(starts) for history, starts in longest if history is not text),
        )


def believe_the_counts(counts: Sequence[int], matched: int) -> list[float]:
    """Return count-based probabilities with an escape for unseen tokens: PPM, method C.

    Each distinct token seen adds to the escape, less so for longer matches. The constants were chosen on this
    project's own sources and notes, cut into short words: there the log loss of a first choice is 0.51,
    against 1.30 for the plain quotient, which is certain of a token seen once.
    """
    total = sum(counts) + len(counts) * min(1.0, 3 / matched)
    return [count / total for count in counts]
