"""RMS norms against their formulas and the models that use them."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm, NemotronHRMSNormGated
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from specdec.kernels.native import pointwise
from specdec.kernels.norm import cpu, reference, triton
from tests.tolerances import BFLOAT16_EQUAL, KERNEL

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
    for weight_D in (draw(shape[-1], dtype=own, seed=1) for own in (torch.float32, dtype)):
        expected = reference.rms_norm(x, weight_D, EPS)
        assert_close(cpu.rms_norm(x, weight_D, EPS), expected)
        if dtype != torch.float64:
            assert_close(triton.rms_norm(x, weight_D, EPS), expected)


@pytest.mark.parametrize("tokens", [1, 7, 513])
def test_rms_norm_reads_strided_heads(tokens: int) -> None:
    query_THD, _ = draw(tokens, 3, 130, dtype=torch.float32).chunk(2, dim=-1)
    weight_D = draw(65, dtype=torch.float32, seed=1)
    expected = reference.rms_norm(query_THD.contiguous(), weight_D, EPS)
    for ops in (cpu, triton) if tokens < 100 else (cpu,):
        assert_close(ops.rms_norm(query_THD, weight_D, EPS), expected)


@pytest.mark.parametrize("tokens", [1, 3])
def test_rms_norm_of_zeros_is_zero(tokens: int) -> None:
    zeros_TD = torch.zeros(tokens, 65)
    assert torch.equal(cpu.rms_norm(zeros_TD, torch.ones(65), EPS), zeros_TD)


@dtypes
@pytest.mark.parametrize("gate_first", [False, True], ids=["gate last", "gate first"])
@pytest.mark.parametrize("weight", ["own", "shared", "wide", "none"])
@pytest.mark.parametrize(
    ("tokens", "runs", "size"), [(1, 1, 63), (1, 4, 65), (7, 3, 1), (63, 2, 64), (265, 8, 128)]
)
def test_gated_norm_equals_reference(
    tokens: int, runs: int, size: int, weight: str, gate_first: bool, dtype: torch.dtype
) -> None:
    x_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    x_TD = draw(tokens, runs * size, dtype=x_dtype)
    gate_TD = draw(tokens, runs * size + 9, dtype=dtype, seed=1)[:, 9:]
    weight_D = None
    if weight != "none":
        wide = weight == "wide" and dtype == torch.bfloat16
        weight_D = draw(
            size if weight == "shared" else runs * size, dtype=torch.float32 if wide else dtype, seed=2
        )
    expected = reference.gated_norm(x_TD, gate_TD, weight_D, EPS, size, gate_first=gate_first)
    interpreted = dtype != torch.float64 and tokens * runs < 100
    for ops in (cpu, triton) if interpreted else (cpu,):
        actual = ops.gated_norm(x_TD, gate_TD, weight_D, EPS, size, gate_first=gate_first)
        assert actual.dtype == dtype
        assert_close(actual, expected)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ops", [cpu, pointwise, reference, triton])
def test_norms_equal_transformers(ops: ModuleType, dtype: torch.dtype, tokens: int) -> None:
    x_TD, gate_TD = (draw(tokens, 4 * 32, dtype=dtype, seed=seed) for seed in (1, 2))
    wide_TD = draw(tokens, 4 * 32, dtype=torch.float32, seed=4)
    weight_D = draw(4 * 32, dtype=dtype, seed=3)
    offset, plain, own = Qwen3NextRMSNorm(4 * 32), NemotronHRMSNorm(4 * 32), Qwen3RMSNorm(4 * 32)
    first, last = NemotronHRMSNormGated(4 * 32, 32), Qwen3NextRMSNormGated(32)
    for module in (offset, plain, own, first, last):
        module.to(dtype).weight.data = weight_D[: len(module.weight)]
    # Mamba-2's prefill scan returns its sums in float32, a delta net's in the model's dtype.
    narrow_TD = wide_TD.to(dtype).view(-1, 32)
    pairs = (
        (ops.rms_norm(x_TD, 1 + weight_D.float(), EPS), offset(x_TD)),
        (ops.rms_norm(x_TD, weight_D.float(), EPS), plain(x_TD)),
        (ops.rms_norm(x_TD, weight_D, EPS), own(x_TD)),
        (
            ops.gated_norm(wide_TD, gate_TD, weight_D, EPS, 32, gate_first=True),
            first(wide_TD, gate_TD).to(dtype),
        ),
        (
            ops.gated_norm(wide_TD, gate_TD, weight_D[:32], EPS, 32, gate_first=False),
            last(narrow_TD, gate_TD.view(-1, 32)).view(tokens, -1),
        ),
    )
    for actual, expected in pairs:
        assert_close(actual, expected)
        assert dtype == torch.float32 or (actual == expected).float().mean() >= BFLOAT16_EQUAL


def test_gating_at_the_other_end_is_seen() -> None:
    x_TD, gate_TD = (draw(3, 65, dtype=torch.float64, seed=seed) for seed in (1, 2))
    first, last = (
        cpu.gated_norm(x_TD, gate_TD, torch.ones(65), EPS, 65, gate_first=gate_first)
        for gate_first in (True, False)
    )
    with pytest.raises(AssertionError):
        assert_close(first, last)
