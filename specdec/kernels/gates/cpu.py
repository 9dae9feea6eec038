"""Gates of a recurrence, in few torch calls."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def delta_gates(
    b_TH: Tensor, a_TH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor, bound: float | None = None
) -> tuple[Tensor, Tensor]:
    x_TH = a_TH.view(-1, *dt_bias_H.shape) + _wide(dt_bias_H)
    rate_H = A_log_H.to(x_TH.dtype).exp().view(-1, *[1] * (dt_bias_H.dim() - 1))
    if bound is None:
        decay_TH = F.softplus(x_TH).mul_(rate_H.neg_())
    else:
        decay_TH = x_TH.mul_(rate_H).sigmoid_().mul_(bound)
    return decay_TH, _wide(torch.sigmoid(b_TH))


def l2_normalise(x_TGK: Tensor, scale: float | Tensor) -> Tensor:
    dtype = torch.float64 if x_TGK.dtype == torch.float64 else torch.float32
    norm_TG1: Tensor = torch.linalg.vector_norm(x_TGK, dim=-1, keepdim=True, dtype=dtype)
    return x_TGK * norm_TG1.square_().add_(1e-6).rsqrt_().mul_(scale)


def mamba_step(dt_TH: Tensor, dt_bias_H: Tensor, limit: tuple[float, float]) -> Tensor:
    step_TH = F.softplus(dt_TH + dt_bias_H.to(dt_TH.dtype))
    low, high = limit
    return _wide(step_TH if low <= 0 and high == math.inf else step_TH.clamp_(low, high))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
