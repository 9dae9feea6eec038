"""Mixtures of experts: reads only the chosen experts' weights, each once and in place."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.ffn.cpu import relu2, swiglu
from specdec.kernels.linear.matrix import Matrix, widen

Multiply = Callable[[int, Tensor], Tensor]
"""Multiplies tokens by the weight of the expert with this index."""
Activate = Callable[[Tensor], Tensor]
WIDE = 64
"""Tokens of an expert from which repacking its weight pays."""


def route_softmax(logits_TE: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
    weight_TA, index_TA = torch.softmax(logits_TE, dim=-1, dtype=wide).topk(top_k, dim=-1)
    if renormalise:
        weight_TA.div_(weight_TA.sum(-1, keepdim=True))
    return index_TA, weight_TA.to(logits_TE.dtype)


def route_sigmoid(
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    score_TE = torch.sigmoid(logits_TE)
    return choose_experts(
        score_TE,
        bias_E,
        top_k,
        groups=groups,
        top_groups=top_groups,
        renormalise=renormalise,
        scale=scale,
        eps=eps,
    )


def choose_experts(
    score_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Choose and weigh experts as `route_sigmoid` does, from nonnegative scores."""
    choice_TE = score_TE + bias_E
    if top_groups < groups:
        choice_TGE = choice_TE.view(len(choice_TE), groups, -1)
        best_two_TG = choice_TGE.topk(2, dim=-1).values.sum(-1)
        excluded_TG = torch.ones_like(best_two_TG, dtype=torch.bool)
        excluded_TG.scatter_(-1, best_two_TG.topk(top_groups, dim=-1, sorted=False).indices, False)
        choice_TE = choice_TGE.masked_fill_(excluded_TG.unsqueeze(-1), -torch.inf).flatten(-2)
    index_TA = choice_TE.topk(top_k, dim=-1, sorted=False).indices
    weight_TA = score_TE.gather(-1, index_TA)
    if renormalise:
        weight_TA = weight_TA.div_(weight_TA.sum(-1, keepdim=True).add_(eps))
    return index_TA, weight_TA if scale == 1 else weight_TA.mul_(scale)


def pack_experts(weight_END: Matrix) -> Tensor:
    """Widen quantised weights to the model's dtype."""
    return weight_END if isinstance(weight_END, Tensor) else widen(weight_END)


def experts(
    x_TD: Tensor,
    up_EID: Tensor,
    down_EDI: Tensor,
    index_TA: Tensor,
    weight_TA: Tensor,
    *,
    gated: bool,
    limit: float = math.inf,
) -> Tensor:
    up, down = (partial(multiply, weight_END) for weight_END in (up_EID, down_EDI))
    activate = partial(swiglu, limit=limit) if gated else relu2
    return mix(x_TD, up, activate, down, index_TA, weight_TA)


def mix(
    x_TD: Tensor, up: Multiply, activate: Activate, down: Multiply, index_TA: Tensor, weight_TA: Tensor
) -> Tensor:
    """Compute each expert for all of its tokens at once.

    A token's outputs are added in the order of its experts, independent of the rest of the batch. An output
    is rounded to the model's dtype, its product with the weight to the wider dtype of the two, and the sum
    once. P counts pairs of a token and an expert.
    """
    num_tokens, top_k = index_TA.shape
    if num_tokens == 1:
        chosen, counts, order_P = index_TA[0].tolist(), [1] * top_k, None
        inputs = (x_TD,) * top_k
    else:
        expert_P, order_P = index_TA.reshape(-1).sort(stable=True)
        hit_E, count_E = torch.unique_consecutive(expert_P, return_counts=True)
        chosen, counts = hit_E.tolist(), count_E.tolist()
        inputs = torch.split(x_TD.index_select(0, order_P // top_k), counts)

    hidden_PI = torch.cat([up(e, x_PD) for e, x_PD in zip(chosen, inputs, strict=True)])
    hidden = torch.split(activate(hidden_PI), counts)
    y_PD = torch.cat([down(e, hidden_PI) for e, hidden_PI in zip(chosen, hidden, strict=True)])
    if order_P is not None:
        y_PD = y_PD.index_select(0, order_P.argsort())
    y_TAD = y_PD.view(num_tokens, top_k, -1)
    # torch sums in float32 or wider, each token alone; a batched product would depend on other tokens.
    return (y_TAD * weight_TA.unsqueeze(-1)).sum(1).to(x_TD.dtype)


def multiply(weight_END: Tensor, expert: int, x_PD: Tensor) -> Tensor:
    """Multiply as `F.linear` does.

    oneDNN repacks the second factor of a bfloat16 product at every call, so the weight goes first: with cold
    weights that is 1.4 times as fast, unless repacking many tokens costs more.
    """
    weight_ND = weight_END[expert]
    if x_PD.dtype != torch.bfloat16 or len(x_PD) >= WIDE:
        return F.linear(x_PD, weight_ND)
    if len(x_PD) == 1:
        return torch.mv(weight_ND, x_PD[0]).unsqueeze(0)
    return torch.mm(weight_ND, x_PD.t()).t()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
