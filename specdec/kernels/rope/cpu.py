"""Rotary positions in few torch calls."""

from collections.abc import Callable

import torch
from torch import Tensor


def rope_table(
    position_T: Tensor, dim: int, theta: float, scaling: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    exponent_R = torch.arange(0, dim, 2, dtype=torch.float32, device=position_T.device).div_(dim)
    frequency_R = 1.0 / theta**exponent_R
    angle_TR = torch.outer(position_T.float(), scaling(frequency_R) if scaling else frequency_R)
    return angle_TR.cos(), angle_TR.sin()


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Round every product separately, so bfloat16 heads match transformers bit for bit."""
    half, width = cos_TR.shape[-1], x_THD.shape[-1]
    cos_T1R, sin_T1R = cos_TR.to(x_THD.dtype).unsqueeze(1), sin_TR.to(x_THD.dtype).unsqueeze(1)
    first_THR, second_THR, rest_THD = torch.split(x_THD, [half, half, width - 2 * half], dim=-1)
    rotated = (
        (first_THR * cos_T1R).sub_(second_THR * sin_T1R),
        (second_THR * cos_T1R).add_(first_THR * sin_T1R),
        rest_THD,
    )
    return torch.cat(rotated, dim=-1)
