"""Rank a node's likeliest samples from a drafter's logits and the target's noise."""

from collections.abc import Sequence

from torch import Tensor

from specdec.kernels.table import Kernels
from specdec.verify.sampler import SamplingNode, perturb, places

Ranked = tuple[list[int], list[float]]
"""Tokens, the likeliest first, and the drafter's confidence in each."""


def rank(
    logits_NV: Tensor, nodes: Sequence[SamplingNode], kernels: Kernels, count: int, *, noise: bool = True
) -> list[Ranked]:
    """Return the `count` best tokens of each node under its request's sampling rule.

    Ties go to the smaller id, as in sampling. The target will compare its logits plus the noise of (seed,
    position, token); this does the same with the drafter's logits. A confidence is the softmax share of these
    scores. With noise it is not a probability, so it must be calibrated to compare nodes. Without noise it is
    one, but for the likeliest tokens rather than the ones about to be sampled.
    """
    choosers = [node.chooser for node in nodes]
    if (
        noise
        and all(chooser.runs_on_device for chooser in choosers)
        and not all(chooser.is_greedy_plain for chooser in choosers)
    ):
        token_NK, share_NK = kernels.topk_with_noise(logits_NV, *places(logits_NV.device, nodes), count)
    else:
        token_NK, share_NK = kernels.topk(perturb(logits_NV, nodes, kernels, noise=noise), count)
    return list(zip(token_NK.tolist(), share_NK.tolist(), strict=True))
