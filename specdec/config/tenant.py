"""Tenants: the key under which everything that outlives a request is stored."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tenant:
    """Key of everything that outlives a request.

    The caller comes from the server's access check, the salt from the request; stores that outlive a request
    are keyed by both. Neither is ever logged.
    """

    caller: str = field(default="", repr=False)
    """Name derived from an API key, never the key itself; empty if none is required."""
    salt: str = field(default="", repr=False)
    source: str = field(default="", repr=False, compare=False)
    """The connection of a request without a key, for fair scheduling; it does not separate caches."""
    weight: float = field(default=1.0, compare=False)
    """Weight of the caller's share of the engine."""

    @property
    def flow(self) -> tuple[str, str]:
        """Caller and salt between which the engine is shared fairly."""
        return self.caller or self.source, self.salt


SOLE = Tenant()
"""The tenant of processes without keys and requests without a salt."""
