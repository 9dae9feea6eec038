"""Suffix decoding (Oliaro et al.): propose what most often followed the longest match, here and elsewhere."""

from collections.abc import Sequence

from specdec.config.tenant import SOLE, Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.continuations import grow_tree
from specdec.draft.history import History
from specdec.draft.lookup import LookupDrafter
from specdec.draft.outputs import Outputs
from specdec.draft.proposal import Proposal, Shape
from specdec.state_slots.slots import RequestId

NGRAMS = (1, 2, 4, 8, 16)
"""The lengths that are indexed; a match may have any length."""
MAX_PLACES = 128
"""How many places are counted, the latest first."""


class SuffixDrafter(LookupDrafter):
    """Draft by how often tokens followed the longest match in a request and in its tenant's earlier outputs.

    The suffix tree is implicit: its node for a context is the list of places where that context ended, found
    by an index of n-grams, and its children are what followed there. So a token costs some 100 bytes
    instead of a path of nodes, an old output is evicted by cutting off the front of a list, and only
    nodes that are looked at are ever made. Counts are of the latest `MAX_PLACES` places.

    The outputs of finished requests are kept up to `max_shared_tokens`, each for requests of its own tenant.
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
        """How deep to draft at most, in lengths of the match."""
        self._outputs = Outputs(NGRAMS, max_depth, max_shared_tokens)

    @property
    def num_shared_tokens(self) -> int:
        """How many tokens of finished outputs are kept, one that ends each included."""
        return self._outputs.num_tokens

    def share(self, output: Sequence[int], tenant: Tenant = SOLE) -> None:
        """Keep an output for later requests of a tenant."""
        self._outputs.add(output, tenant)

    def end(
        self,
        key: RequestId,
        prompt: Sequence[int] = (),
        output: Sequence[int] | None = None,
        tenant: Tenant = SOLE,
    ) -> None:
        """Forget a sequence; an output that came to its end serves its tenant's later ones."""
        super().end(key)
        if output:
            self.share(output, tenant)

    def flush(self, caller: str | None = None) -> None:
        """Forget the outputs of finished requests: all, or one caller's."""
        self._outputs.flush(caller)

    def continue_text(self, text: History, shape: Shape, tenant: Tenant) -> Proposal:
        """Propose the likeliest continuations of the longest match, own or of its tenant."""
        context = text.tokens[-text.depth :]
        texts = (text, *self._outputs.of(tenant))
        found = [(each, *each.search(context, MAX_PLACES)) for each in texts]
        matched = max(length for _, length, _ in found)
        num_steps = min(shape.num_steps, max(int(self.length_factor * matched), 1))
        longest = [(each, places) for each, length, places in found if length == matched]
        return grow_tree(
            context[-1],
            [each.continuation(place, num_steps) for each, places in longest for place in places],
            matched=matched,
            shape=shape,
            believe=believe_the_counts,
            calibrator=self.calibrator,
            shared=sum(len(places) for each, places in longest if each is not text),
        )


def believe_the_counts(counts: Sequence[int], matched: int) -> list[float]:
    """Divide as the counts do, with room for what never followed: PPM's escape, method C.

    Each token that was seen to follow says that new ones do; the less the longer the match. The constants
    were chosen on this project's own sources and notes, cut into short words: there the log loss of a first
    choice is 0.51, against 1.30 for the bare quotient, which is certain of whatever it saw once.
    """
    total = sum(counts) + len(counts) * min(1.0, 3 / matched)
    return [count / total for count in counts]
