"""Rank what a node's target is likeliest to choose, from a drafter's logits and the target's own noise."""

from collections.abc import Sequence

from torch import Tensor

from specdec.kernels.table import Kernels
from specdec.verify.choose import Node, perturb, places

Ranked = tuple[list[int], list[float]]
"""Tokens, the likeliest first, and how sure the drafter is of each."""


def rank(
    logits_NV: Tensor, nodes: Sequence[Node], kernels: Kernels, count: int, *, noise: bool = True
) -> list[Ranked]:
    """Return the `count` best tokens of each node under its request's own rule of choice.

    Of equals the smaller id is first, as it is chosen. The target will compare its logits plus the noise of
    (seed, position, token); so does this, with the drafter's logits. A confidence is the share of a token
    under a softmax of what is compared, which is no probability once noise is in it: what compares nodes
    must calibrate it. Without the noise it is one, of tokens that are the likeliest and not the coming ones.
    """
    choosers = [node.chooser for node in nodes]
    if (
        noise
        and all(own.runs_on_device for own in choosers)
        and not all(own.is_greedy_plain for own in choosers)
    ):
        token_NK, share_NK = kernels.topk_with_noise(logits_NV, *places(logits_NV.device, nodes), count)
    else:
        token_NK, share_NK = kernels.topk(perturb(logits_NV, nodes, kernels, noise=noise), count)
    return list(zip(token_NK.tolist(), share_NK.tolist(), strict=True))
