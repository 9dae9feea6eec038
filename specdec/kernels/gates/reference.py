"""Gates of a recurrence, as in the models' formulas."""

import torch
import torch.nn.functional as F
from torch import Tensor


def delta_gates(
    b_TH: Tensor, a_TH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor, bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-decay -e^A softplus(a + bias) and the write strength sigmoid(b).

    With a lower bound the log-decay is bound · sigmoid(e^A (a + bias)). A bias [H, K] gives decays [T, H, K]
    from a's H K columns. The strength is rounded to the model's dtype before it is widened, as in training.
    """
    x_TH = _wide(a_TH).view(-1, *dt_bias_H.shape) + dt_bias_H
    rate_H = torch.exp(A_log_H.to(x_TH.dtype)).view(-1, *[1] * (dt_bias_H.dim() - 1))
    decay_TH = -rate_H * F.softplus(x_TH) if bound is None else bound * torch.sigmoid(rate_H * x_TH)
    return decay_TH, _wide(torch.sigmoid(b_TH))


def l2_normalise(x_TGK: Tensor, scale: float | Tensor) -> Tensor:
    """Scale every head to length `scale`; a tensor [G, 1] has one length per head."""
    x_TGK = _wide(x_TGK)
    squares_TG1 = (x_TGK * x_TGK).sum(-1, keepdim=True)
    return scale * x_TGK / torch.sqrt(squares_TG1 + 1e-6)


def mamba_step(dt_TH: Tensor, dt_bias_H: Tensor, limit: tuple[float, float]) -> Tensor:
    """Return Mamba-2's step size: softplus(dt + bias), clamped to its limits.

    The sum and the step are rounded to the model's dtype before the step is widened.
    """
    sum_TH = dt_TH + dt_bias_H.to(dt_TH.dtype)
    return _wide(F.softplus(_wide(sum_TH)).to(dt_TH.dtype).clamp(*limit))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
