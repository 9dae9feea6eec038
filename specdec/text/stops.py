"""Stop strings as one automaton per request (Aho-Corasick), which all its choices share."""

from collections.abc import Sequence


class StopNode:
    """An automaton state: the longest suffix of the text that is a prefix of a stop string. Built on demand.

    A character costs one look-up, whatever the number of stop strings. Not thread-safe.
    """

    __slots__ = ("_ahead", "_depth", "_fallback", "held", "stop")

    def __init__(self, stops: Sequence[str], depth: int = 0, fallback: "StopNode | None" = None) -> None:
        """Build the node of stop strings that share their first `depth` characters."""
        self._depth, self._fallback = depth, fallback
        self._ahead: dict[str, StopNode | list[str]] = {}
        """By the next character: the node, or its stop strings until it is built."""
        for stop in stops:
            if len(stop) > depth:
                self._ahead.setdefault(stop[depth], []).append(stop)  # type: ignore[union-attr]
        ends = next((stop for stop in stops if len(stop) == depth), None)
        self.stop: str | None = ends or (fallback.stop if fallback else None)
        """The longest stop string that ends here."""
        self.held: int = depth if self._ahead or not fallback else fallback.held
        """Length of the text's suffix that an unfinished stop string may begin with."""

    @classmethod
    def of(cls, stop: str | Sequence[str] | None) -> "StopNode":
        """Return the root node, for an empty text."""
        return cls([stop] if isinstance(stop, str) else stop or ())

    @property
    def is_final(self) -> bool:
        """Whether no stop string continues from here."""
        return not self._ahead

    def after(self, sign: str) -> "StopNode":
        """Return the node after one more character."""
        node = self
        while (ahead := node._ahead.get(sign)) is None:
            if node._fallback is None:
                return node
            node = node._fallback
        if isinstance(ahead, list):
            fallback = node._fallback.after(sign) if node._fallback else node
            ahead = node._ahead[sign] = StopNode(ahead, node._depth + 1, fallback)
        return ahead
