"""Accept drafts at fixed rates instead of by content, to measure speculation with any weights.

For benchmarks only: the text is no longer the model's, and outputs are marked as synthetic.
"""

from collections.abc import Sequence

from specdec.kernels.tree import row
from specdec.state_slots.tree import TokenTree


def rates_for(length: float, num_steps: int) -> tuple[float, ...]:
    """Return equal rates that give drafts of `num_steps` this mean acceptance length, bonus included."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        mean = sum(rate**depth for depth in range(num_steps + 1))
        low, high = (rate, high) if mean < length else (low, rate)
    return (high,) * num_steps


def accept_at_rates(
    chosen: Sequence[int], tree: TokenTree, rates: Sequence[float], *, seed: int, position: int
) -> tuple[list[int], TokenTree]:
    """Rewrite choices and a tree so that a walk accepts each node's first child at its depth's rate.

    `position` is that of the token sampled at the root. The bonus token is still the target's choice.
    """
    accepted, tokens = row.accept_at_rates(
        chosen, tree.tokens, tree.parents, rates, seed=seed, position=position
    )
    return accepted, TokenTree(tuple(tokens), tree.parents)
