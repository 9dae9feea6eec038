"""A tape repeats the same calls on the same memory, and refuses calls that it cannot repeat."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
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
def test_a_recorded_choice_reads_current_memory() -> None:
    """Greedy or sampled, with other seeds and positions, and with NaN."""
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
def test_a_replay_reads_current_memory(dtype: torch.dtype) -> None:
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


def chosen(x: Tensor, n: Tensor) -> Tensor:
    """Index along one dimension by another tensor's values, as a walk does."""
    order = n.sort(dim=-1, descending=True, stable=True).indices
    spread = torch.zeros_like(n).scatter(1, order, torch.arange(5).expand_as(order))
    return torch.cat([order, spread, n.gather(1, (n % 5).flip(1))], 1)


def placed(x: Tensor, n: Tensor) -> Tensor:
    """Write in place, at random and by halves."""
    made = n.clone()
    made[:, 1:3] = n[:, 3:]
    made.add_(n[:, :1]).masked_fill_(n > 2, -7)
    made[1:].copy_(made[:-1].clone())
    made.index_fill_(0, n[:1, 0] % 3, 9)
    return made


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "numbers": lambda x, n: (n + 3) * n // 3 - n % 4 + (n ^ 5) + (n & 3) + (n | 8),
    "order": lambda x, n: torch.where(n > 1, n.minimum(3 - n), n.maximum(n * 2)).clamp(-3, 6),
    "truth": lambda x, n: ~((n == 2) | (n != n.flip(0)) & (n >= 0)) ^ (n < 0),
    "fractions": lambda x, n: (x * 0.3 + x / 1.7 - x).clamp(max=0.5).minimum(x.flip(1)),
    "one type to another": lambda x, n: torch.stack([n.double(), x.double(), n.bool().double()]),
    "to the model's type": lambda x, n: torch.stack([x.double().to(x.dtype), n.to(x.dtype)], -1),
    "sums": lambda x, n: torch.cat([n.sum(-1, keepdim=True), (n > 1).any(-1)[:, None].long()], 1),
    "sorted": lambda x, n: x.sort(dim=-1, stable=True).values,
    "chosen": chosen,
    "in place": placed,
    "padded": lambda x, n: torch.nn.functional.pad(n, (1, 2), value=-1),
    "repeated": lambda x, n: n.repeat_interleave(3, dim=1),
    "rows": lambda x, n: x.view(3, 5, 1).expand(3, 5, 70).gather(1, (n % 5)[..., None].expand(3, 5, 70)),
    "turned": lambda x, n: x.t().reshape(-1),
}


SIGNLESS = [OPERATIONS["fractions"]]
"""The smaller of two zeros may have either sign."""


@needs_c
def test_equals_are_sorted_in_their_order_and_zeros_are_equals() -> None:
    x = torch.tensor([[0.0, -0.0, 0.0, -0.0, torch.nan, 1.0]], dtype=torch.float64)
    for falls in (True, False):
        with Tape() as tape:
            found = x.sort(dim=-1, descending=falls, stable=True)
        for turned in (x.clone(), x.flip(1), -x):
            x.copy_(turned)
            wanted = x.sort(dim=-1, descending=falls, stable=True)
            tape.play()
            assert found.indices.tolist() == wanted.indices.tolist()


@needs_c
def test_integers_are_divided_at_their_limits() -> None:
    ends = [-(2**63), 2**63 - 1, -1, 0, 7, -7]
    n, by = torch.tensor([ends]), torch.tensor([[-1, 3, -3, 5, 2**62, -(2**62)]])
    with Tape() as tape:
        found = n // by.clamp(min=2), n % by.clamp(min=2), n * by + n
    n.copy_(n.flip(1))
    tape.play()
    for own, wanted in zip(found, (n // by.clamp(min=2), n % by.clamp(min=2), n * by + n), strict=True):
        assert torch.equal(own, wanted)


@needs_c
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
@pytest.mark.parametrize("compute", OPERATIONS.values(), ids=OPERATIONS)
@torch.inference_mode()
def test_replays_of_torch_operations_are_bit_identical(
    compute: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    x, n = drawn(3, 5).to(dtype), torch.arange(15).view(3, 5) % 7 - 2
    with Tape() as tape:
        found = compute(x, n)
    assert tape.refused is None
    for seed in range(4):
        x.copy_(drawn(3, 5 + seed)[:, :5])
        x[seed % 3, seed] = [torch.nan, torch.inf, -0.0, 0.0][seed]
        n.copy_(torch.randint(-9, 9, (3, 5), generator=torch.Generator().manual_seed(seed)))
        wanted = compute(x, n)
        tape.play()
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(0), wanted.nan_to_num(0))
        if compute not in SIGNLESS:
            assert torch.equal(found.nan_to_num(0).signbit(), wanted.nan_to_num(0).signbit())


@needs_c
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.exp(),
        lambda x: x.sum(),
        lambda x: x.sum(-1),
        lambda x: x @ x.t(),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x[x > 0],
        lambda x: x.int() / 3,
        lambda x: x.half() + 1,
        lambda x: torch.arange(4).add_(1),
        lambda x: torch.rand(3),
        lambda x: int(x[0, 0]),
        lambda x: bool(x[0, 0] > 0),
        lambda x: x.tolist(),
        lambda x: x % 2,
        lambda x: x // 2,
        lambda x: x.logical_not(),
        lambda x: x.long() >= 0.5,
        lambda x: x.bfloat16() == 0.1,
        lambda x: 0.3 - x.bfloat16(),
        lambda x: x.scatter_reduce(1, torch.zeros(3, 1, dtype=torch.int64), x[:, :1], "sum"),
        lambda x: torch.add(x, 1, out=torch.empty(3, 4)),
        lambda x: numpy.asarray(x),
        lambda x: x.numpy(),
    ],
)
@torch.inference_mode()
def test_operations_without_bit_identical_replay_are_refused(compute: Callable[[Tensor], object]) -> None:
    with Tape() as tape:
        compute(torch.ones(3, 4))
    assert tape.refused


@needs_c
@torch.inference_mode()
def test_constants_are_computed_once() -> None:
    n = torch.tensor([[3, 1, 2]])
    with Tape() as tape:
        ring = (torch.arange(3)[:, None] + torch.arange(3)) % 3
        found = n.gather(1, ring[1:2])
    n += 10
    tape.play()
    assert found.tolist() == [[11, 12, 13]] and len(tape._calls) == 2


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


@needs_c
def test_an_abandoned_tape_is_freed_at_once() -> None:
    """A tape holds much memory in few objects: the cycle collector would come too late."""
    with Tape() as tape:
        torch.ones(9).clone()
    gone = weakref.ref(tape)
    gc.disable()
    try:
        del tape
        assert gone() is None
    finally:
        gc.enable()
