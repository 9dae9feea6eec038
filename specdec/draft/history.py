"""Token history with an n-gram index: find where a context occurred before."""

from array import array
from collections.abc import Sequence

import numpy as np

END = -1
"""Separates texts in one history. It is no token, so no context matches across it."""
MAX_STEPS = 512
"""Maximum chain steps, which bounds the time of a search in very repetitive text."""
BASE, MIX, MASK = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, (1 << 64) - 1
"""Multipliers of the polynomial n-gram hash and of its value, whose high bits select the bucket."""
FEW = 64
"""Below this many tokens a Python loop indexes faster than numpy."""


def _extend(prefix: int, tokens: Sequence[int]) -> list[int]:
    """Return the rolling hash after each token, continuing from `prefix`."""
    return [prefix := prefix * BASE + token & MASK for token in tokens]


class NgramTable:
    """Map an n-gram to the positions where it ended, latest first, by hash chains as in DEFLATE.

    `heads` holds the latest position per bucket, and `earlier` the previous one per position. Other n-grams
    of a bucket share its chain, so a search compares tokens. Positions count from the first token ever added;
    those below `first` are forgotten and end a chain, since chains only lead back in time.
    """

    def __init__(self, length: int, num_heads: int) -> None:
        self.length = length
        self.heads = array("q", [-1]) * num_heads
        self.earlier = array("q")
        self._shift = 65 - num_heads.bit_length()
        self._power = pow(BASE, length, MASK + 1)

    def index(self, prefix: "array[int]", start: int, first: int) -> None:
        """Add the n-grams that end at index `start` or later, given the hashes of all prefixes."""
        length, count = self.length, len(prefix) - 1
        self.earlier.extend([-1] * (min(length - 1, count) - start))
        start = max(start, length - 1)
        if count - start >= FEW:
            self._index_many(np.frombuffer(prefix, np.uint64)[start - length + 1 :], start + first)
            return
        for end in range(start + 1, count + 1):
            bucket = self._bucket(prefix[end] - prefix[end - length] * self._power)
            self.earlier.append(self.heads[bucket])
            self.heads[bucket] = end - 1 + first

    def _index_many(self, prefix_P: "np.ndarray[tuple[int], np.dtype[np.uint64]]", position: int) -> None:
        """Add n-grams, the first of which ends at `position`."""
        hash_N = prefix_P[self.length :] - prefix_P[: -self.length] * np.uint64(self._power)
        bucket_N = (hash_N * np.uint64(MIX)) >> np.uint64(self._shift)
        # Sort by bucket: each n-gram links to the previous one of its bucket, the first to the bucket's head.
        order_N = np.argsort(bucket_N, kind="stable")
        bucket_N, position_N = bucket_N[order_N], order_N + position
        is_first_N = np.append(True, bucket_N[1:] != bucket_N[:-1])
        heads = np.frombuffer(self.heads, np.int64)
        earlier_N = np.empty(len(hash_N), np.int64)
        earlier_N[order_N] = np.where(is_first_N, heads[bucket_N], np.roll(position_N, 1))
        is_last_N = np.append(is_first_N[1:], True)
        heads[bucket_N[is_last_N]] = position_N[is_last_N]
        self.earlier.frombytes(earlier_N.tobytes())

    def _bucket(self, hashed: int) -> int:
        return (hashed * MIX & MASK) >> self._shift

    def latest(self, ngram: Sequence[int]) -> int:
        """Return the latest position in the n-gram's bucket."""
        return self.heads[self._bucket(_extend(0, ngram)[-1])]


class TokenHistory:
    """Tokens and an index of their n-grams of several lengths, about 20 bytes per token and length.

    Appending takes constant amortised time. `search` matches contexts of up to `depth` tokens, also beyond
    the longest n-gram: the index gives candidate positions, and token comparison extends the match.
    """

    def __init__(self, lengths: Sequence[int], depth: int) -> None:
        assert min(lengths) >= 1 and max(lengths) <= depth
        self.tokens: list[int] = []
        self._prefix = array("Q", [0])
        """Hash of each prefix, the empty one and the full text included."""
        self.depth = depth
        self.tables = [NgramTable(length, 1024) for length in sorted(lengths, reverse=True)]
        self.first = 0
        """Number of forgotten tokens."""

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self._prefix.extend(_extend(self._prefix[-1], tokens))
        num_heads = len(self.tables[0].heads)
        if len(self.tokens) > 2 * num_heads:
            while len(self.tokens) > num_heads // 2:
                num_heads *= 2
            self.tables = [NgramTable(table.length, num_heads) for table in self.tables]
            start = 0
        for table in self.tables:
            table.index(self._prefix, start, self.first)

    def forget(self, num_tokens: int) -> None:
        """Drop the oldest tokens."""
        del self.tokens[:num_tokens], self._prefix[:num_tokens]
        for table in self.tables:
            del table.earlier[:num_tokens]
        self.first += num_tokens

    def search(self, context: Sequence[int], most: int) -> tuple[int, list[int]]:
        """Find the longest suffix of `context` that occurred here with a token after it.

        Return its length, 0 for none, and at most `most` indices in `tokens` of the following token, latest
        first. Chain steps are limited, so the oldest occurrences may be missed.
        """
        for table in self.tables:
            if table.length <= len(context):
                length, positions = self._follow(table, context[-self.depth :], most)
                if positions:
                    return length, positions[:most]
        return 0, []

    def _follow(self, table: NgramTable, context: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """Follow the chain of the last n-gram of `context`; return the longest match and its places."""
        tokens, first = self.tokens, self.first
        length, positions = table.length, list[int]()
        wanted = list(context[-length:])
        position = table.latest(wanted)
        for _ in range(MAX_STEPS):
            if position < first:
                break
            next_ = position - first + 1
            followed = length <= next_ < len(tokens) and tokens[next_] != END
            if followed and tokens[next_ - length : next_] == wanted:
                longer = self._extend_match(context, next_, length)
                if longer > length:
                    length, wanted = longer, list(context[-longer:])
                    positions.clear()
                positions.append(next_)
                if length == len(context) and len(positions) == limit:
                    break
            position = table.earlier[position - first]
        return length, positions

    def _extend_match(self, context: Sequence[int], next_: int, length: int) -> int:
        longest = min(len(context), next_)
        while length < longest and self.tokens[next_ - length - 1] == context[-length - 1]:
            length += 1
        return length

    def continuation(self, start: int, limit: int) -> list[int]:
        """Return at most `limit` tokens from index `place` on, within the same text.

        If the history ends first, the tokens from `place` to its end repeat, as in a copy that overlaps its
        source.
        """
        tokens = self.tokens[start : start + limit]
        if END in tokens:
            return tokens[: tokens.index(END)]
        return [tokens[i % len(tokens)] for i in range(limit)] if len(tokens) < limit else tokens
