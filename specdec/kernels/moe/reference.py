"""Mixtures of experts, token by token."""

import math
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.ffn.reference import relu2, swiglu
from specdec.kernels.linear.matrix import Matrix, expert_of, widen


def route_softmax(logits_TE: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Choose the most probable experts [T, A] and weigh them by their probabilities, in the logits' dtype."""
    indices, weights = [], []
    for logits_E in logits_TE:
        weight_A, index_A = torch.softmax(_wide(logits_E), dim=-1).topk(top_k)
        if renormalise:
            weight_A = weight_A / weight_A.sum()
        indices.append(index_A)
        weights.append(weight_A.to(logits_TE.dtype))
    return torch.stack(indices), torch.stack(weights)


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
    """Choose the experts [T, A] with the highest biased scores; weigh them by the unbiased scores.

    Scores and weights are in the logits' dtype, each step rounded to it; the bias may be wider. Only experts
    in the `top_groups` groups with the highest sum of two best scores are candidates.
    """
    indices, weights = [], []
    for logits_E in logits_TE:
        score_E = torch.sigmoid(_wide(logits_E)).to(logits_E.dtype)
        choice_GE = (score_E + bias_E).view(groups, -1)
        if top_groups < groups:
            best_two_G = choice_GE.topk(2).values.sum(-1)
            allowed_G = torch.zeros(groups, dtype=torch.bool, device=logits_TE.device)
            allowed_G[best_two_G.topk(top_groups).indices] = True
            choice_GE = choice_GE.masked_fill(~allowed_G[:, None], -torch.inf)
        index_A = choice_GE.flatten().topk(top_k, sorted=False).indices
        weight_A = score_E[index_A]
        if renormalise:
            weight_A = weight_A / (weight_A.sum() + eps)
        indices.append(index_A)
        weights.append(weight_A * scale)
    return torch.stack(indices), torch.stack(weights)


def pack_experts(weight_END: Matrix) -> Matrix:
    """Return the weights unchanged."""
    return weight_END


def experts(
    x_TD: Tensor,
    up_EID: Matrix,
    down_EDI: Matrix,
    index_TA: Tensor,
    weight_TA: Tensor,
    *,
    gated: bool,
    limit: float = math.inf,
) -> Tensor:
    """Sum the outputs of each token's experts times their weights; gated experts have rows [gate | up].

    An output is rounded to the model's dtype, its product with the weight to the wider dtype of the two, and
    the sum, in the order of the token's experts, once.
    """
    activate = partial(swiglu, limit=limit) if gated else relu2
    y_TD = torch.zeros_like(_wide(x_TD))
    for token, x_D in enumerate(x_TD):
        for index, weight in zip(index_TA[token].tolist(), weight_TA[token].unsqueeze(-1), strict=True):
            up_ID, down_DI = (widen(expert_of(m, index), y_TD.dtype) for m in (up_EID, down_EDI))
            hidden_I = activate((up_ID @ _wide(x_D)).to(x_D.dtype))
            answer_D = (down_DI @ _wide(hidden_I)).to(x_D.dtype)
            y_TD[token] += answer_D * weight
    return y_TD.to(x_TD.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
