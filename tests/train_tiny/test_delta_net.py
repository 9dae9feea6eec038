"""The chunked delta rule equals its recurrence, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.delta_net import gated_delta_rule, unit_inverse

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _inputs(length: int, heads: int = 3, key: int = 8, value: int = 16) -> Inputs:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, heads, length, *shape, generator=generator)

    q, k = (F.normalize(draw(key), dim=-1) for _ in range(2))
    inputs = q, k, draw(value), -F.softplus(draw()), draw().sigmoid()
    return tuple(x.requires_grad_() for x in inputs)  # type: ignore[return-value]


def _recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute token by token: decay, read the error, write it, read the output."""
    B, H, length, K = k.shape
    state = torch.zeros(B, H, K, v.shape[-1])
    outputs = []
    for t in range(length):
        state = state * g[:, :, t, None, None].exp()
        update = beta[:, :, t, None] * (v[:, :, t] - (state * k[:, :, t, :, None]).sum(2))
        state = state + k[:, :, t, :, None] * update[:, :, None]
        outputs.append((state * q[:, :, t, :, None]).sum(2))
    return torch.stack(outputs, 2)


@pytest.mark.parametrize(("length", "chunk"), [(8, 8), (64, 16), (64, 64), (96, 32)])
def test_chunks_are_the_recurrence_and_so_are_their_gradients(length: int, chunk: int) -> None:
    inputs = _inputs(length)
    found = gated_delta_rule(*inputs, chunk=chunk, dtype=torch.float32)
    wanted = _recurrence(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, wanted))
    for own, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)


def test_bfloat16_products_stay_near() -> None:
    inputs = _inputs(64)
    found = gated_delta_rule(*inputs, chunk=16, dtype=torch.bfloat16).float()
    wanted = _recurrence(*inputs)
    assert (found - wanted).abs().max() < 0.03 * wanted.abs().max()


def test_a_chunk_that_forgets_its_state_is_another_function() -> None:
    inputs = _inputs(64)
    halves = [gated_delta_rule(*(x[:, :, s] for x in inputs), chunk=16, dtype=torch.float32)  # type: ignore[misc]
              for s in (slice(0, 32), slice(32, 64))]  # fmt: skip
    assert (torch.cat(halves, 2) - _recurrence(*inputs)).abs().max() > 0.1


@pytest.mark.parametrize("size", [8, 16, 64])
def test_inverse_of_unit_triangles(size: int) -> None:
    lower = torch.randn(3, size, size, generator=torch.Generator().manual_seed(size)).tril(-1) * 0.3
    lower.requires_grad_()
    one = torch.eye(size)
    torch.testing.assert_close(
        unit_inverse(lower) @ (one + lower), one.expand(3, -1, -1), rtol=1e-4, atol=1e-4
    )
    weight = torch.randn(3, size, size, generator=torch.Generator().manual_seed(0))
    (found,) = torch.autograd.grad((unit_inverse(lower) * weight).sum(), lower)
    (wanted,) = torch.autograd.grad((torch.linalg.inv(one + lower) * weight).sum(), lower)
    torch.testing.assert_close(found.tril(-1), wanted.tril(-1), rtol=1e-3, atol=1e-3)
