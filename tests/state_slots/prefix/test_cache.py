"""Whatever requests compute, share, cache and release, hits return the right prefix, token for token."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from specdec.config.tenant import SOLE
from specdec.state_slots.prefix import tree as tree_module
from specdec.state_slots.prefix.lease import PrefixHit, PrefixLease
from specdec.state_slots.prefix.tree import Ids, PrefixNode
from tests.selection import EXHAUSTIVE
from tests.state_slots.prefix.trial import Trial, make

SEEDS = {
    "hybrid": (0, 1),
    "hybrid and a head": (2, 3),
    "by worth": (4,),
    "attention": (5,),
    "attention and a head": (6,),
    "recurrent": (7,),
    "two tiers": (8,),
    "two tiers of attention": (9,),
}
OPERATIONS = 10_000
"""For each of the ten runs."""


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, seeds in SEEDS.items() for seed in seeds], ids=str
)
def test_random_operations_lend_the_prefilled_prefixes(name: str, seed: int) -> None:
    trial = make[name](seed=seed)
    trial.run(OPERATIONS)
    did, counts = trial.did, trial.cache.counts
    assert min(did["hits"], did["ended"]) > 300 and did["tokens"] > 2000 and did["proofs"] > 100
    assert counts.blocks_evicted > 1000 or not trial.layout.kv
    assert counts.fetched > 2000 or not trial.lower_slabs
    assert min(counts.states_cached, counts.states_evicted) > 500 or not trial.layout.states


@pytest.mark.parametrize("name", SEEDS)
def test_without_eviction_every_prefix_is_hit(name: str) -> None:
    trial = make[name](slabs=3000, roomy=True, seed=1)
    trial.run(1_500)
    assert trial.did["hits"] > 100 and trial.did["preempted"] == trial.did["refused"] == 0


Mutate = Callable[[Trial, pytest.MonkeyPatch], None]


def _a_split_forgets_the_shared_block(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    tree, right = trial.cache.tree, trial.cache.tree._split

    def split(node: PrefixNode, at: int) -> PrefixNode:
        upper = right(node, at)
        if at % tree.size and len(upper.blocks) > 1:
            trial.arena.release_blocks(upper, [upper.blocks.pop()])
        return upper

    tree._split = split  # type: ignore[method-assign]


def _a_split_leaves_the_lower_part_without_it(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    tree, right = trial.cache.tree, trial.cache.tree._split

    def split(node: PrefixNode, at: int) -> PrefixNode:
        upper = right(node, at)
        if at % tree.size and len(node.blocks) > 1:
            # The same number of blocks, shifted by one: its own first block replaces the shared one.
            trial.arena.release_blocks(node, node.blocks[:1])
            node.blocks = [*node.blocks[1:], *node.blocks[:1]]
        return upper

    tree._split = split  # type: ignore[method-assign]


def _a_join_drops_blocks(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    tree, right = trial.cache.tree, trial.cache.tree.join

    def join(node: PrefixNode) -> PrefixNode:
        (child,) = node.children.values()
        count = len(child.blocks)
        right(node)
        if len(child.blocks) > count:
            trial.arena.release_blocks(child, [child.blocks.pop(0)])
        return child

    tree.join = join  # type: ignore[method-assign]


def _a_join_mixes_blocks_up(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    tree, right = trial.cache.tree, trial.cache.tree.join

    def join(node: PrefixNode) -> PrefixNode:
        child = right(node)
        child.blocks = child.blocks[::-1]
        return child

    tree.join = join  # type: ignore[method-assign]


def _an_edges_last_token_is_ignored(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    right = tree_module.common

    def common(edge: Ids, ids: Ids) -> int:
        found = right(edge, ids)
        return found + (found == len(edge) - 1 and len(ids) > found > 0)

    patch.setattr(tree_module, "common", common)


def _a_walk_stops_a_token_short(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    right = tree_module.common
    patch.setattr(tree_module, "common", lambda edge, ids: max(right(edge, ids) - 1, 1))


def _the_parents_state_is_lent(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    cache, right = trial.cache, trial.cache.lend

    def lend(owner: Hashable, lease: PrefixLease, state: int | None) -> PrefixHit:
        node, above = lease.found, lease.found.parent
        own = node.state
        while above and above.state is None:
            above = above.parent
        node.state = above.state if above else own
        hit = right(owner, lease, state)
        node.state = own
        return hit

    cache.lend = lend  # type: ignore[method-assign]


def _a_partial_block_is_shared(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    cache, right = trial.cache, trial.cache.lease

    def lease(*asked: Any) -> PrefixLease:
        found = right(*asked)
        return replace(found, shared=max(found.shared, -(-found.length // cache.tree.size)))

    cache.lease = lease  # type: ignore[method-assign]


def _what_a_head_will_write_is_shared(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    cache, right = trial.cache, trial.cache.lease

    def lease(*asked: Any) -> PrefixLease:
        found = right(*asked)
        return replace(found, shared=max(found.shared, found.length // cache.tree.size))

    cache.lease = lease  # type: ignore[method-assign]


def _a_state_is_shared_and_not_copied(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    cache = trial.cache

    def keep_copy(node: PrefixNode, state: int | None, hidden_1D: Tensor | None) -> None:
        if state is not None and node.state is None:
            node.state, node.hidden_1D = state, hidden_1D
            trial.arena._states.share(node, state)

    cache.keep_copy = keep_copy  # type: ignore[method-assign]


def _a_state_is_kept_of_the_node_above(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    cache, right = trial.cache, trial.cache.keep

    def keep(node: PrefixNode, owner: Hashable, state: int, hidden_1D: Tensor | None) -> None:
        above = node.parent
        right(above if above and not above.is_root else node, owner, state, hidden_1D)

    cache.keep = keep  # type: ignore[method-assign]


def _a_node_with_a_state_grows(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    tree = trial.cache.tree

    def may_grow(node: PrefixNode, table: Sequence[int]) -> bool:
        if node.is_root or node.children:
            return False
        return not tree.pages or table[(node.end - 1) // tree.size] == node.blocks[-1]

    tree._may_grow = may_grow  # type: ignore[method-assign]


def _a_node_grows_by_anybodys_blocks(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    def may_grow(node: PrefixNode, table: Sequence[int]) -> bool:
        return not node.is_root and not node.children and node.state is None

    trial.cache.tree._may_grow = may_grow  # type: ignore[method-assign]


def _what_is_about_to_be_lent_gives_way(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    right = trial.cache._is_evictable

    def is_evictable(node: PrefixNode) -> bool:
        pinned, trial.cache.tree.pinned = trial.cache.tree.pinned, []
        found = right(node)
        trial.cache.tree.pinned = pinned
        return found

    trial.cache._is_evictable = is_evictable  # type: ignore[method-assign]


def _a_lock_stays_where_it_was(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    cache, right = trial.cache, trial.cache.note

    def note(lease: PrefixLease, tokens: Sequence[int], table: Sequence[int]) -> PrefixNode:
        before, node = lease.node, right(lease, tokens, table)
        before.locks += 1
        node.locks -= 1
        return node

    cache.note = note  # type: ignore[method-assign]


def _what_is_given_up_keeps_its_state(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    cache, right = trial.cache, trial.cache._evict

    def evict(node: PrefixNode) -> None:
        state = node.state
        right(node)
        node.state = state

    cache._evict = evict  # type: ignore[method-assign]


def _what_is_fetched_is_kept_at_once(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    """It uses memory reserved for others, and moves blocks that are not yet in any table."""
    cache, right = trial.cache, trial.cache.lend

    def lend(owner: Hashable, lease: PrefixLease, state: int | None) -> PrefixHit:
        hit = right(owner, lease, state)
        if hit.fetched:
            tokens = lease.store.tree.token_ids(lease.found)[: hit.length]
            cache.keep_copy(cache.note(lease, tokens, hit.blocks), state, hit.hidden_1D)
        return hit

    cache.lend = lend  # type: ignore[method-assign]


def _tenants_are_one(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    tree, right = trial.cache.tree, trial.cache.tree.root
    tree.root = lambda tenant: right(SOLE)  # type: ignore[method-assign]


def _two_tokens_pass_for_one(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    right = tree_module.common
    patch.setattr(tree_module, "common", lambda edge, ids: right(edge // 2, np.asarray(ids) // 2))


MUTANTS: Sequence[tuple[Mutate, str]] = (
    (_a_split_forgets_the_shared_block, "hybrid"),
    (_a_split_leaves_the_lower_part_without_it, "attention"),
    (_a_join_drops_blocks, "hybrid"),
    (_a_join_mixes_blocks_up, "hybrid"),
    (_an_edges_last_token_is_ignored, "hybrid"),
    (_an_edges_last_token_is_ignored, "attention"),
    (_a_walk_stops_a_token_short, "attention"),
    (_the_parents_state_is_lent, "hybrid"),
    (_the_parents_state_is_lent, "recurrent"),
    (_a_partial_block_is_shared, "hybrid"),
    (_a_partial_block_is_shared, "attention"),
    (_what_a_head_will_write_is_shared, "hybrid and a head"),
    (_a_state_is_shared_and_not_copied, "recurrent"),
    (_a_state_is_kept_of_the_node_above, "hybrid"),
    (_a_node_with_a_state_grows, "hybrid"),
    (_a_node_grows_by_anybodys_blocks, "attention"),
    (_what_is_about_to_be_lent_gives_way, "hybrid"),
    (_a_lock_stays_where_it_was, "attention"),
    (_what_is_given_up_keeps_its_state, "hybrid"),
    (_what_is_fetched_is_kept_at_once, "two tiers"),
    (_tenants_are_one, "attention"),
    (_two_tokens_pass_for_one, "attention"),
)


@pytest.mark.parametrize(
    ("mutate", "name"), MUTANTS, ids=lambda own: own if isinstance(own, str) else own.__name__.strip("_")
)
def test_the_random_run_rejects_a_mutant(mutate: Mutate, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make[name](seed=4)
    mutate(trial, monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        trial.run(10_000)
