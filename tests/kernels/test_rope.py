"""Rotary positions, bit for bit those of transformers."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding, apply_rotary_pos_emb

from specdec.kernels.rope import cpu, reference

dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def positions(count: int) -> Tensor:
    return torch.randint(0, 200_000, (count,), generator=torch.Generator().manual_seed(3))


def head_config(factor: float, theta: float) -> dict[str, object]:
    parameters = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
    return {"head_dim": 64, "rope_parameters": parameters, "max_position_embeddings": 1 << 20}


@pytest.mark.parametrize("count", [1, 63, 65])
@pytest.mark.parametrize(("dim", "theta"), [(2, 10_000.0), (64, 1e7), (30, 5e5)])
def test_table_equals_reference(dim: int, theta: float, count: int) -> None:
    actual, expected = (ops.rope_table(positions(count), dim, theta) for ops in (cpu, reference))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert a.shape == (count, dim // 2)
        assert torch.equal(a, e)


@dtypes
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "rotary"), [(1, 1, 2, 2), (1, 4, 64, 16), (63, 3, 65, 64), (65, 2, 31, 6)]
)
def test_rotate_equals_reference(tokens: int, heads: int, dim: int, rotary: int, dtype: torch.dtype) -> None:
    x_THD = draw(tokens, heads, dim + 3, dtype=dtype)[..., 3:]
    table = cpu.rope_table(positions(tokens), rotary, 1e4)
    before = x_THD.clone()
    actual = cpu.rotate(x_THD, *table)
    assert torch.equal(x_THD, before)
    assert actual.dtype == dtype
    assert torch.equal(actual, reference.rotate(x_THD, *table))
    assert torch.equal(actual[..., rotary:], x_THD[..., rotary:])


@dtypes
@pytest.mark.parametrize("factor", [0.25, 1.0])
def test_partial_rope_equals_transformers(factor: float, dtype: torch.dtype) -> None:
    position_T = positions(65)
    rotary = int(64 * factor)
    embedding = Qwen3NextRotaryEmbedding(Qwen3NextConfig(**head_config(factor, 1e7)))
    q_THD, k_TJD = draw(65, 4, 64, dtype=dtype), draw(65, 2, 64, dtype=dtype, seed=1)
    cos, sin = embedding(q_THD, position_T[None])
    q, k = apply_rotary_pos_emb(q_THD.transpose(0, 1)[None], k_TJD.transpose(0, 1)[None], cos, sin)
    table = cpu.rope_table(position_T, rotary, 1e7)
    assert torch.equal(cpu.rotate(q_THD, *table), q[0].transpose(0, 1))
    assert torch.equal(cpu.rotate(k_TJD, *table), k[0].transpose(0, 1))


def test_interleaved_sections_are_plain_for_text() -> None:
    config = head_config(1.0, 1e7)
    config["rope_parameters"] = {**config["rope_parameters"], "mrope_section": [11, 11, 10]}
    embedding = Qwen3_5MoeTextRotaryEmbedding(Qwen3_5MoeTextConfig(**config))
    position_T = positions(63)
    cos, sin = embedding(torch.zeros(1), position_T[None])
    cos_TR, sin_TR = cpu.rope_table(position_T, 64, 1e7)
    assert torch.equal(cos_TR, cos[0, :, :32])
    assert torch.equal(sin_TR, sin[0, :, :32])


def test_a_frequency_that_counts_in_the_head_is_seen() -> None:
    """The exponent of a partial rope is based on the rotated entries, not on the head dim."""
    wrong, _ = cpu.rope_table(positions(5), 64, 1e4)
    right, _ = cpu.rope_table(positions(5), 16, 1e4)
    assert not torch.equal(wrong[:, :8], right)
