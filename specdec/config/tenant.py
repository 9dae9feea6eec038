"""Tenants: the key under which everything that outlives a request is stored."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tenant:
    """Key of everything that outlives a request.

    The server's access check says who calls, the request's parameters which salt; every store that outlives
    a request is asked with both. No log shows either.
    """

    caller: str = field(default="", repr=False)
    """What the access check calls the holder of an API key, never the key; empty where none is asked for."""
    salt: str = field(default="", repr=False)
    source: str = field(default="", repr=False, compare=False)
    """The connection of a request without a key, for fair scheduling; it does not separate caches."""
    weight: float = field(default=1.0, compare=False)
    """Weight of the caller's share of the engine."""

    @property
    def flow(self) -> tuple[str, str]:
        """Return the caller and the salt between which the engine is shared fairly."""
        return self.caller or self.source, self.salt


SOLE = Tenant()
"""The only one there is, as long as a process asks for no keys and no request brings a salt."""
