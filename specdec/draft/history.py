"""Text that was seen, and where in it a context occurred before."""

from array import array
from collections.abc import Sequence

END = -1
"""Ends a text that others follow in one history. It is no token, so no context matches across it."""
MAX_STEPS = 512
"""How far a chain is followed: what bounds the time of a search in the most repetitive text."""


class Table:
    """Lead from an n-gram to where it ended, latest first, by hash chains as in DEFLATE.

    `heads` holds the latest position per bucket and `earlier` the position before it, per position. Other
    n-grams of the same bucket lie on the same chain, so a search compares. Positions count from the
    first token ever; those below `first` are forgotten, and end a chain, which always leads back in time.
    """

    def __init__(self, length: int, num_heads: int) -> None:
        self.length = length
        self.heads = array("q", [-1]) * num_heads
        self.earlier = array("q")

    def index(self, tokens: list[int], start: int, first: int) -> None:
        """Add the n-grams that end at `tokens[start:]`."""
        length, heads, earlier, mask = self.length, self.heads, self.earlier, len(self.heads) - 1
        earlier.extend([-1] * (min(length - 1, len(tokens)) - start))
        start = max(start, length - 1)
        for position, end in enumerate(range(start + 1, len(tokens) + 1), start + first):
            bucket = hash(tuple(tokens[end - length : end])) & mask
            earlier.append(heads[bucket])
            heads[bucket] = position

    def bucket(self, ngram: Sequence[int]) -> int:
        """Return the latest position in the n-gram's bucket."""
        return self.heads[hash(tuple(ngram)) & len(self.heads) - 1]


class History:
    """Tokens in order, and an index of their n-grams of some lengths: some 20 bytes a token and length.

    Appending takes constant amortised time. `search` matches contexts up to `depth` tokens, beyond the
    longest n-gram too: the index gives the places, comparing the tokens there gives the length.
    """

    def __init__(self, lengths: Sequence[int], depth: int) -> None:
        assert min(lengths) >= 1 and max(lengths) <= depth
        self.tokens: list[int] = []
        self.depth = depth
        self.tables = [Table(length, 1024) for length in sorted(lengths, reverse=True)]
        self.first = 0
        """How many tokens were forgotten."""

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        start = len(self.tokens)
        self.tokens.extend(tokens)
        num_heads = len(self.tables[0].heads)
        if len(self.tokens) > 2 * num_heads:
            while len(self.tokens) > num_heads // 2:
                num_heads *= 2
            self.tables = [Table(table.length, num_heads) for table in self.tables]
            start = 0
        for table in self.tables:
            table.index(self.tokens, start, self.first)

    def forget(self, num_tokens: int) -> None:
        """Drop the oldest tokens."""
        del self.tokens[:num_tokens]
        for table in self.tables:
            del table.earlier[:num_tokens]
        self.first += num_tokens

    def search(self, context: Sequence[int], most: int) -> tuple[int, list[int]]:
        """Find the longest end of `context` that something followed here.

        Return its length, 0 for none, and the indices in `tokens` of what followed, latest first, at most
        `most` of them. A chain is followed for so many steps, so that the oldest places may be missed.
        """
        for table in self.tables:
            if table.length <= len(context):
                length, places = self._follow(table, context[-self.depth :], most)
                if places:
                    return length, places[:most]
        return 0, []

    def _follow(self, table: Table, context: Sequence[int], most: int) -> tuple[int, list[int]]:
        """Follow the chain of the last n-gram of `context`; keep the places of the longest match."""
        tokens, first = self.tokens, self.first
        length, places = table.length, list[int]()
        wanted = list(context[-length:])
        position = table.bucket(wanted)
        for _ in range(MAX_STEPS):
            if position < first:
                break
            next_ = position - first + 1
            followed = length <= next_ < len(tokens) and tokens[next_] != END
            if followed and tokens[next_ - length : next_] == wanted:
                longer = self._extend_match(context, next_, length)
                if longer > length:
                    length, wanted = longer, list(context[-longer:])
                    places.clear()
                places.append(next_)
                if length == len(context) and len(places) == most:
                    break
            position = table.earlier[position - first]
        return length, places

    def _extend_match(self, context: Sequence[int], next_: int, length: int) -> int:
        most = min(len(context), next_)
        while length < most and self.tokens[next_ - length - 1] == context[-length - 1]:
            length += 1
        return length

    def continuation(self, place: int, limit: int) -> list[int]:
        """Return what followed from an index on: at most `limit` tokens of the same text.

        Where the text ends first, it goes on as if it repeated itself with the period from `place` to its
        end, as a copy does that overlaps its source.
        """
        found = self.tokens[place : place + limit]
        if END in found:
            return found[: found.index(END)]
        return [found[i % len(found)] for i in range(limit)] if len(found) < limit else found
