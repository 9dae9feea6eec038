"""Rotary positions as transformers computes them."""

from collections.abc import Callable

import torch
from torch import Tensor


def rope_table(
    position_T: Tensor, dim: int, theta: float, scaling: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, dim / 2] in float32; frequency exponents are relative to `dim`.

    `scaling` maps the frequencies to those used.
    """
    exponent_R = torch.arange(0, dim, 2, device=position_T.device).float() / dim
    frequency_R = 1.0 / theta**exponent_R
    if scaling is not None:
        frequency_R = scaling(frequency_R)
    angle_TR = torch.stack([position.float() * frequency_R for position in position_T])
    return angle_TR.cos(), angle_TR.sin()


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate entry i of each head against entry R + i, for i < R, in the dtype of x; copy the rest."""
    half = cos_TR.shape[-1]
    out_THD = x_THD.clone()
    for token, x_HD in enumerate(x_THD):
        cos_R, sin_R = cos_TR[token].to(x_THD.dtype), sin_TR[token].to(x_THD.dtype)
        first_HR, second_HR = x_HD[:, :half], x_HD[:, half : 2 * half]
        out_THD[token, :, :half] = first_HR * cos_R - second_HR * sin_R
        out_THD[token, :, half : 2 * half] = second_HR * cos_R + first_HR * sin_R
    return out_THD
