"""Identifiers of prefixes in tests: numbers computed from all of their tokens, and the tokens of nodes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.arena import Arena
from specdec.state_slots.prefix.tiers import Tier
from specdec.state_slots.prefix.tree import PrefixNode

TENANTS = (*[SOLE] * 10, Tenant(salt="other"), Tenant("another"))
"""Texts of another salt or caller are never found."""
Views = Sequence[NDArray[np.float32]]


def views(arena: Arena) -> tuple[Views, Views]:
    """Return an arena's blocks by layer, and its states' parts."""
    memories = [arena.recurrent(layer) for layer in range(len(arena.layout.states))]
    pages = [arena.pages(layer).numpy() for layer in range(len(arena.layout.kv))]
    return pages, [part.numpy() for memory in memories for part in (memory.state_SHKW, memory.window_SIC)]


def names(text: Sequence[int]) -> NDArray[np.float32]:
    """Hash each prefix of a text over all of its tokens; float32 holds the hashes exactly."""
    found, name = [], 1
    for token in text:
        name = (name * 31 + token + 7) % 16_777_213
        found.append(name)
    return np.asarray(found, np.float32)


def whole_of(node: PrefixNode) -> list[int]:
    """Return all tokens of a prefix."""
    return [token for own in node.path() for token in own.edge.tolist()]


def tenant_of(cache: Tier, node: PrefixNode) -> Tenant:
    while node.parent:
        node = node.parent
    return next(tenant for tenant, root in cache.tree.roots.items() if root is node)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of two texts' common prefix."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count
