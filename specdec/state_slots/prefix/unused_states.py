"""States that are cached speculatively, until a request uses them."""

from specdec.state_slots.prefix.tree import PrefixNode


class UnusedStates:
    """Nodes with an unused state, per caller in the order of caching."""

    def __init__(self) -> None:
        self._of: dict[str, dict[PrefixNode, None]] = {}

    def add(self, node: PrefixNode) -> None:
        self._of.setdefault(node.tenant.caller, {})[node] = None

    def discard(self, node: PrefixNode) -> bool:
        """Remove a node; return whether it was a guess."""
        nodes = self._of.get(node.tenant.caller, {})
        if node not in nodes:
            return False
        del nodes[node]
        if not nodes:
            del self._of[node.tenant.caller]
        return True

    def next(self) -> PrefixNode | None:
        """Return the oldest guess of the caller with the most guesses."""
        if not self._of:
            return None
        largest = max(self._of.values(), key=len)
        return next(iter(largest))

    def clear(self) -> None:
        self._of.clear()
