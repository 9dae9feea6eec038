"""A tape makes the same calls of the same memory, and refuses what it could not make again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.gather import cpu, reference
from specdec.kernels.native import compiled, gather, pointwise, sampling
from specdec.kernels.native.tape import Tape
from specdec.kernels.sampling.rules import Rules

needs_c = pytest.mark.skipif(compiled.compiled() is None, reason="no C compiler was found")
TYPES = [torch.float32, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("ops", [cpu, pytest.param(gather, marks=needs_c)], ids=["cpu", "native"])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_rows_are_copied_as_the_reference_copies_them(ops: object, dtype: torch.dtype) -> None:
    table, ids = drawn(9, 6, dtype=dtype), torch.tensor([8, 0, 8, 3])
    left, right = drawn(4, 6, dtype=dtype), drawn(4, 20, dtype=dtype)[:, 3:9]
    for name, given in (
        ("embedding", (table, ids)),
        ("concat", (left, right)),
        ("concat", (right,)),
        ("add", (left, left)),
    ):
        found = getattr(ops, name)(*given)
        assert torch.equal(found, getattr(reference, name)(*given))
        assert all(found.data_ptr() != part.data_ptr() for part in given)


@pytest.mark.parametrize("ops", [cpu, pytest.param(gather, marks=needs_c)], ids=["cpu", "native"])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_columns_are_spread_as_the_reference_spreads_them(ops: Any, dtype: torch.dtype) -> None:
    given = drawn(3, 4, dtype=dtype), torch.tensor([6, 0, 2, 8]), 9
    assert torch.equal(ops.scatter_columns(*given), reference.scatter_columns(*given))
    tokens_T1 = torch.tensor([[1 << 40], [3]])
    assert torch.equal(ops.concat(tokens_T1, tokens_T1 + 1), torch.cat([tokens_T1, tokens_T1 + 1], 1))


@needs_c
def test_a_guess_is_played_for_what_now_lies_there() -> None:
    """Cold or warm, of other seeds and places, and where something is no number."""
    logits_NV, rules = drawn(2, 50, dtype=torch.bfloat16), Rules(torch.tensor([0.0, 0.7]))
    seed_N, position_N = torch.tensor([1, 2]), torch.tensor([8, 9])
    given = logits_NV, rules, seed_N, position_N, 2
    with Tape() as tape:
        found = sampling.topk_with_noise(*given)
    assert tape.refused is None
    for i, odd in enumerate((0.0, torch.nan)):
        logits_NV.copy_(drawn(2, 50 + i)[:, :50])
        logits_NV[1, 3] += odd
        rules.temperature_N.copy_(torch.tensor([0.9, 0.0]))
        seed_N += i + 1
        position_N += 3
        tape.play()
        for played, now in zip(found, sampling.topk_with_noise(*given), strict=True):
            assert torch.equal(played, now)


@needs_c
@pytest.mark.parametrize("dtype", TYPES)
@torch.inference_mode()
def test_what_is_played_reads_what_now_lies_there(dtype: torch.dtype) -> None:
    x, y, weight = drawn(3, 8, dtype=dtype), drawn(3, 8, dtype=dtype), drawn(8)

    def run() -> Tensor:
        return gather.concat(pointwise.swiglu(pointwise.add_rms_norm(x, y, weight, 1e-6)[:, :6]), x)

    with Tape() as tape:
        out = run()
    assert tape.refused is None and tape.nbytes > 0
    for seed in range(3):
        x.copy_(drawn(3, 8 + seed, dtype=dtype)[:, :8])
        y.copy_(drawn(3, 9 + seed, dtype=dtype)[:, :8])
        before = x.clone()
        wanted = run()
        x.copy_(before)
        garbage = [torch.full((3, 11), 7.0, dtype=dtype) for _ in range(50)]
        tape.play()
        assert torch.equal(out, wanted) and len(garbage) == 50


@needs_c
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.clone(),
        lambda x: x.to(torch.float64),
        lambda x: torch.cat([x, x]),
        lambda x: torch.zeros(3),
        lambda x: x.t().reshape(-1),
        lambda x: x.add_(1),
    ],
)
@torch.inference_mode()
def test_what_torch_computes_is_refused(compute: Callable[[Tensor], Tensor]) -> None:
    with Tape() as tape:
        compute(torch.empty(3, 4))
    assert tape.refused


@needs_c
@torch.inference_mode()
def test_views_and_fresh_memory_are_no_computation() -> None:
    x = drawn(4, 6)
    with Tape() as tape:
        x[1:3].t()
        x.view(2, 12).split([4, 8], 1)
        x.float().unsqueeze(0).expand(3, 4, 6)
        x.new_empty(5)
    assert tape.refused is None
