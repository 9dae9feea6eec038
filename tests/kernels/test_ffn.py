"""The activations against their formulas and those of transformers."""

from types import SimpleNamespace

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from specdec.kernels.ffn import cpu, reference, triton
from tests.tolerances import KERNEL

dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 63), (63, 65), (8, 1024)])
def test_activations_equal_reference(tokens: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(tokens, 2 * width, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    before = x_TI.clone()
    for name, columns in (("swiglu", width), ("geglu", width), ("relu2", 2 * width)):
        actual, expected = getattr(cpu, name)(x_TI), getattr(reference, name)(x_TI)
        assert actual.shape == (tokens, columns)
        torch.testing.assert_close(actual, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype])
    actual, expected = (form.swiglu(x_TI, 0.5) for form in (cpu, reference))
    torch.testing.assert_close(actual, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype])
    assert torch.equal(x_TI, before)


@dtypes
def test_activations_equal_transformers(dtype: torch.dtype) -> None:
    x_TI = torch.linspace(-9, 9, 126).to(dtype).view(3, 42)
    gate_TI, up_TI = x_TI.chunk(2, dim=-1)
    assert torch.equal(cpu.swiglu(x_TI), ACT2FN["silu"](gate_TI) * up_TI)
    assert torch.equal(cpu.geglu(x_TI), ACT2FN["gelu"](gate_TI) * up_TI)
    assert torch.equal(cpu.relu2(x_TI), ACT2FN["relu2"](x_TI))
    own = SimpleNamespace(act_fn=ACT2FN["silu"], limit=0.5)
    assert torch.equal(cpu.swiglu(x_TI, 0.5), Step3p7Experts._apply_gate(own, x_TI))
    assert not torch.allclose(cpu.swiglu(x_TI, 0.5), cpu.swiglu(x_TI))


def test_swapped_halves_are_seen() -> None:
    x_TI = torch.tensor([[1.0, 2.0]])
    for activate in (cpu.swiglu, cpu.geglu):
        assert not torch.allclose(activate(x_TI), activate(x_TI.flip(-1)))


@dtypes
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 65), (2, 1025)])
def test_a_gated_sum_equals_reference_and_formula(tokens: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    y_TD, x_TD, gates_TN = (
        torch.randn(tokens, columns, generator=generator, dtype=torch.float64).to(dtype)
        for columns in (width, width, 5)
    )
    gate_T1 = gates_TN[:, 4:]
    expected = reference.add_gated(y_TD, x_TD, gate_T1)
    for ops in (cpu, triton) if dtype != torch.float64 else (cpu,):
        actual = ops.add_gated(y_TD, x_TD, gate_T1)
        torch.testing.assert_close(actual, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype])
    assert not torch.allclose(expected, y_TD + x_TD)
