"""RMS norms against their formulas and against the models they come from."""

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm, NemotronHRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from specdec.kernels.norm import cpu, reference
from tests.tolerances import KERNEL

EPS = 1e-6
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = KERNEL[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@dtypes
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 63), (1, 1, 65), (8, 64), (3, 5, 65), (1, 4, 63), (65, 1031), (1, 2, 40_000)],
    ids=str,
)
def test_rms_norm_equals_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    weight_D = draw(shape[-1], dtype=torch.float32, seed=1)
    actual = cpu.rms_norm(x, weight_D, EPS)
    assert_close(actual, reference.rms_norm(x, weight_D, EPS))


@pytest.mark.parametrize("tokens", [1, 7, 513])
def test_rms_norm_reads_strided_heads(tokens: int) -> None:
    query_THD, _ = draw(tokens, 3, 130, dtype=torch.float32).chunk(2, dim=-1)
    weight_D = draw(65, dtype=torch.float32, seed=1)
    assert_close(
        cpu.rms_norm(query_THD, weight_D, EPS), reference.rms_norm(query_THD.contiguous(), weight_D, EPS)
    )


@pytest.mark.parametrize("tokens", [1, 3])
def test_rms_norm_of_zeros_is_zero(tokens: int) -> None:
    zeros_TD = torch.zeros(tokens, 65)
    assert torch.equal(cpu.rms_norm(zeros_TD, torch.ones(65), EPS), zeros_TD)


@dtypes
@pytest.mark.parametrize("gate_first", [False, True], ids=["gate last", "gate first"])
@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weight"])
@pytest.mark.parametrize(
    ("tokens", "runs", "size"), [(1, 1, 63), (1, 4, 65), (7, 3, 1), (63, 2, 64), (265, 8, 128)]
)
def test_gated_norm_equals_reference(
    tokens: int, runs: int, size: int, shared: bool, gate_first: bool, dtype: torch.dtype
) -> None:
    x_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    x_TD = draw(tokens, runs * size, dtype=x_dtype)
    gate_TD = draw(tokens, runs * size + 9, dtype=dtype, seed=1)[:, 9:]
    weight_D = draw(size if shared else runs * size, dtype=dtype, seed=2)
    expected = reference.gated_norm(x_TD, gate_TD, weight_D, EPS, size, gate_first=gate_first)
    actual = cpu.gated_norm(x_TD, gate_TD, weight_D, EPS, size, gate_first=gate_first)
    assert actual.dtype == dtype
    assert_close(actual, expected)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_equal_transformers(dtype: torch.dtype, tokens: int) -> None:
    x_TD, gate_TD = (draw(tokens, 4 * 32, dtype=dtype, seed=seed) for seed in (1, 2))
    weight_D = draw(4 * 32, dtype=dtype, seed=3)
    offset, plain = Qwen3NextRMSNorm(4 * 32), NemotronHRMSNorm(4 * 32)
    first, last = NemotronHRMSNormGated(4 * 32, 32), Qwen3NextRMSNormGated(32)
    for module in (offset, plain, first, last):
        module.to(dtype).weight.data = weight_D[: len(module.weight)]
    wide_D = weight_D.float()
    assert_close(cpu.rms_norm(x_TD, 1 + wide_D, EPS), offset(x_TD))
    assert_close(cpu.rms_norm(x_TD, wide_D, EPS), plain(x_TD))
    actual = cpu.gated_norm(x_TD, gate_TD, weight_D, EPS, 32, gate_first=True)
    assert_close(actual, first(x_TD, gate_TD))
    expected = last(x_TD.view(-1, 32), gate_TD.view(-1, 32)).view(tokens, -1)
    assert_close(cpu.gated_norm(x_TD, gate_TD, weight_D[:32], EPS, 32, gate_first=False), expected)


def test_gating_at_the_other_end_is_seen() -> None:
    x_TD, gate_TD = (draw(3, 65, dtype=torch.float64, seed=seed) for seed in (1, 2))
    first, last = (
        cpu.gated_norm(x_TD, gate_TD, torch.ones(65), EPS, 65, gate_first=gate_first)
        for gate_first in (True, False)
    )
    with pytest.raises(AssertionError):
        assert_close(first, last)
