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
        own = self._of.get(node.tenant.caller, {})
        if node not in own:
            return False
        del own[node]
        if not own:
            del self._of[node.tenant.caller]
        return True

    def next(self) -> PrefixNode | None:
        """Return the oldest guess of the caller with the most guesses."""
        if not self._of:
            return None
        most = max(self._of.values(), key=len)
        return next(iter(most))

    def clear(self) -> None:
        self._of.clear()
