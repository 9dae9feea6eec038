"""Inputs of a recurrence: fast kernels against the formulas, and the formulas against definitions."""

import math

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels.gates import cpu, reference
from tests.tolerances import KERNEL

# Only the inputs are narrow: both implementations compute in float32.
TOLERANCE = {**KERNEL, torch.bfloat16: KERNEL[torch.float32]}
WIDE = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_delta_gates_equal_reference(dtype: torch.dtype, tokens: int) -> None:
    # Inputs are columns of a wider projection, as in a layer.
    b_TH, a_TH = noise(tokens, 10, dtype=dtype).mul(20).split(5, dim=-1)
    A_log_H, bias_H = noise(5, seed=1).float(), noise(5, seed=2).to(WIDE[dtype])
    before = a_TH.clone(), A_log_H.clone()
    for actual, expected in zip(
        cpu.delta_gates(b_TH, a_TH, A_log_H, bias_H),
        reference.delta_gates(b_TH, a_TH, A_log_H, bias_H),
        strict=True,
    ):
        assert actual.dtype == expected.dtype == WIDE[dtype]
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(a_TH, before[0]) and torch.equal(A_log_H, before[1])


@pytest.mark.parametrize("ops", [reference, cpu])
def test_delta_gates_decay_and_write_within_their_ranges(ops: object) -> None:
    b_TH = torch.tensor([[-100.0, 0.0, 100.0]])
    decay_TH, beta_TH = ops.delta_gates(b_TH, b_TH, torch.zeros(3), torch.zeros(3))
    torch.testing.assert_close(decay_TH, torch.tensor([[0.0, -math.log(2), -100.0]]))
    torch.testing.assert_close(beta_TH, torch.tensor([[0.0, 0.5, 1.0]]))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bounded_decays_equal_the_formula(dtype: torch.dtype) -> None:
    """A vector per head, from almost no decay to the bound itself, including inputs that would overflow."""
    b_TH, a_TN = (
        noise(7, 3, dtype=dtype),
        noise(7, 12, dtype=dtype).mul(torch.tensor([[1.0, 1e4, 1e38]]).repeat(1, 4).to(dtype)),
    )
    A_log_H, bias_HK = noise(3, seed=1).float(), noise(3, 4, seed=2).to(WIDE[dtype])
    x_THK = a_TN.double().view(7, 3, 4) + bias_HK.double()
    formula_THK = -5 / (1 + torch.exp(-torch.exp(A_log_H.double())[:, None] * x_THK))
    for ops in (reference, cpu):
        decay_THK, _ = ops.delta_gates(b_TH, a_TN, A_log_H, bias_HK, -5.0)
        assert decay_THK.min() == -5 and decay_THK.max() <= 0 and decay_THK.dtype == WIDE[dtype]
        torch.testing.assert_close(decay_THK.double(), formula_THK, rtol=1e-5, atol=1e-6)


def test_delta_gates_round_the_strength_to_the_models_dtype() -> None:
    b_TH = torch.tensor([[0.3]], dtype=torch.bfloat16)
    for ops in (reference, cpu):
        _, beta_TH = ops.delta_gates(b_TH, b_TH, torch.zeros(1), torch.zeros(1))
        assert torch.equal(beta_TH, torch.sigmoid(b_TH).float())


@pytest.mark.parametrize(
    "scale", [1.0, 0.25, torch.tensor([[0.5], [1.0], [2.0]])], ids=["1", "0.25", "per head"]
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_l2_normalise_equals_reference(dtype: torch.dtype, scale: float | torch.Tensor) -> None:
    x_TGK = noise(7, 40, dtype=dtype)[:, 4:37].view(7, 3, 11)
    x_TGK[2, 1] = 0
    before = x_TGK.clone()
    actual, expected = cpu.l2_normalise(x_TGK, scale), reference.l2_normalise(x_TGK, scale)
    assert actual.dtype == expected.dtype == WIDE[dtype]
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(x_TGK, before)
    assert not actual[2, 1].any()


@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.01, math.inf), (0.0, 0.5), (0.01, 0.5)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_mamba_step_equals_reference(dtype: torch.dtype, limit: tuple[float, float]) -> None:
    dt_TH, bias_H = noise(7, 5, dtype=dtype).mul(8), noise(5, seed=2).to(WIDE[dtype])
    before = dt_TH.clone()
    actual, expected = cpu.mamba_step(dt_TH, bias_H, limit), reference.mamba_step(dt_TH, bias_H, limit)
    assert actual.dtype == expected.dtype == WIDE[dtype]
    torch.testing.assert_close(actual, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype])
    assert limit[0] <= actual.min() and actual.max() <= limit[1]
    assert torch.equal(dt_TH, before)


def test_mamba_step_is_rounded_as_in_transformers() -> None:
    dt_TH, bias_H = noise(7, 5, dtype=torch.bfloat16), noise(5, seed=2).bfloat16()
    expected = F.softplus(dt_TH + bias_H).float()
    for ops in (reference, cpu):
        assert torch.equal(ops.mamba_step(dt_TH, bias_H.float(), (0.0, math.inf)), expected)
