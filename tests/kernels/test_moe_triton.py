"""Routing, experts and activations in Triton against their references."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from specdec.kernels.ffn import reference as ffn_reference
from specdec.kernels.ffn import triton as ffn_triton
from specdec.kernels.linear import fp8
from specdec.kernels.linear.matrix import Matrix
from specdec.kernels.moe import reference, triton
from specdec.kernels.routing import triton as routing
from tests.tolerances import KERNEL

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Without a GPU, kernels are interpreted."""
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KINDS: dict[str, Callable[[Tensor], Matrix]] = {"dense": lambda weight_END: weight_END, "fp8": fp8.quantise}
kinds = pytest.mark.parametrize("kind", KINDS)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare relative to the largest entry: small ones are differences of large products, each rounded."""
    assert actual.dtype == expected.dtype
    tolerance = KERNEL[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def best(key_E: Tensor, top_k: int) -> list[int]:
    """Sort by loops: larger first, ties by index."""
    return sorted(range(len(key_E)), key=lambda e: (-float(key_E[e]), e))[:top_k]


@dtypes
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 1, 1), (3, 65, 8), (9, 7, 7), (2, 512, 10)])
def test_softmax_routing_equals_reference(
    tokens: int, num_experts: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    drawn = draw(tokens, num_experts, dtype=dtype)
    for logits_TE in (drawn, drawn.round()):  # rounded, most choices are ties
        index_TA, weight_TA = routing.route_softmax(logits_TE, top_k, renormalise=renormalise)
        assert index_TA.tolist() == [best(logits_E, top_k) for logits_E in logits_TE]
        _, expected_TA = reference.route_softmax(logits_TE, top_k, renormalise=renormalise)
        assert_close(weight_TA, expected_TA)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "groups", "top_groups"),
    [(1, 8, 2, 1, 1), (3, 65, 8, 1, 1), (5, 12, 3, 4, 2), (5, 64, 6, 8, 3), (3, 12, 4, 4, 4)],
)
def test_sigmoid_routing_equals_reference(
    tokens: int, num_experts: int, top_k: int, groups: int, top_groups: int, renormalise: bool
) -> None:
    """Some in bfloat16, in which every step is rounded."""
    bias_E = draw(num_experts, seed=1).mul(0.3)
    options = {"groups": groups, "top_groups": top_groups, "renormalise": renormalise, "scale": 2.5}
    options["eps"] = 1e-6 if groups == 1 else 1e-20
    logits_TE = draw(tokens, num_experts, dtype=torch.bfloat16 if groups == 1 else torch.float32)
    index_TA, weight_TA = routing.route_sigmoid(logits_TE, bias_E, top_k, **options)
    found, expected = (
        sorted(zip(index_TA.flatten().tolist(), weight_TA.flatten().tolist(), strict=True))
        for index_TA, weight_TA in (
            (index_TA, weight_TA), reference.route_sigmoid(logits_TE, bias_E, top_k, **options)
        )
    )  # fmt: skip
    assert [e for e, _ in found] == [e for e, _ in expected]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    alike_TA, _ = routing.route_sigmoid(0 * logits_TE, 0 * bias_E, top_k, **options)
    assert alike_TA.tolist() == [list(range(top_k))] * tokens


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_nan_token_routes_to_valid_experts(value: float) -> None:
    logits_TE = draw(3, 12)
    logits_TE[1] = value
    logits_TE[2, 3] = value
    options = {"groups": 3, "top_groups": 2, "renormalise": True, "scale": 1.0}
    with numpy.errstate(all="ignore"):  # used by the interpreter
        softmax = routing.route_softmax(logits_TE, 4, renormalise=True)
        sigmoid = routing.route_sigmoid(logits_TE, logits_TE.new_zeros(12), 4, **options)
    for index_TA, weight_TA in (softmax, sigmoid):
        for chosen in index_TA.tolist():
            assert len(set(chosen)) == 4 and set(chosen) <= set(range(12))
        assert weight_TA[0].isfinite().all()


def draw_experts(
    num_experts: int, width: int, hidden: int, *, gated: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    up_EID = draw(num_experts, width * (2 if gated else 1), hidden, seed=5).mul(hidden**-0.5)
    return up_EID.to(dtype), draw(num_experts, hidden, width, seed=6).mul(width**-0.5).to(dtype)


def choose(tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    index_TA = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)])
    return index_TA.to(DEVICE), torch.rand(tokens, top_k, generator=generator).to(DEVICE)


@dtypes
@kinds
@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu2"])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "width", "hidden"),
    [
        (1, 1, 1, 1, 1),
        (1, 9, 4, 63, 65),
        (3, 3, 2, 140, 130),
        (16, 5, 3, 8, 16),
        (17, 5, 2, 7, 33),
        (65, 2, 1, 72, 8),
    ],
)
def test_experts_equal_reference(
    tokens: int,
    num_experts: int,
    top_k: int,
    width: int,
    hidden: int,
    gated: bool,
    kind: str,
    dtype: torch.dtype,
) -> None:
    x_TD = draw(tokens, hidden, dtype=dtype)
    weights = [KINDS[kind](w) for w in draw_experts(num_experts, width, hidden, gated=gated, dtype=dtype)]
    index_TA, weight_TA = choose(tokens, num_experts, top_k)
    given_TA = weight_TA.to(dtype) if gated else weight_TA  # in the respective router's dtype
    own: dict[str, Any] = {"gated": gated, "limit": 0.5 if width % 2 else torch.inf}
    found = triton.experts(x_TD, *weights, index_TA, given_TA, **own)
    assert_close(found, reference.experts(x_TD, *weights, index_TA, given_TA, **own))


@kinds
@pytest.mark.parametrize("tokens", [1, 9, 20])
def test_unrouted_experts_are_not_read(tokens: int, kind: str) -> None:
    weights = [KINDS[kind](w) for w in draw_experts(30, 8, 16, gated=True, dtype=torch.float32)]
    index_TA, weight_TA = choose(tokens, 15, 2)
    x_TD = draw(tokens, 16)
    expected = triton.experts(x_TD, *weights, index_TA, weight_TA, gated=True)
    idle_E = torch.ones(30, dtype=torch.bool, device=DEVICE)
    idle_E[index_TA.flatten()] = False
    for matrix in weights:
        (matrix if isinstance(matrix, Tensor) else matrix.scale_MK)[idle_E] = torch.nan
    assert torch.equal(triton.experts(x_TD, *weights, index_TA, weight_TA, gated=True), expected)


@pytest.mark.parametrize("tokens", [9, 24])
def test_a_token_does_not_depend_on_its_window(tokens: int) -> None:
    """Bit for bit among windows of one kind, whatever the other tokens hold and choose."""
    weights = draw_experts(12, 40, 130, gated=True, dtype=torch.bfloat16)
    x_TD, (index_TA, weight_TA) = draw(tokens, 130, dtype=torch.bfloat16), choose(tokens, 12, 3)
    expected = triton.experts(x_TD, *weights, index_TA, weight_TA, gated=True)[2]
    alone = slice(2, 3) if tokens <= triton.NARROW_WINDOW else slice(2, 22)
    found = triton.experts(x_TD[alone], *weights, index_TA[alone], weight_TA[alone], gated=True)[0]
    assert torch.equal(found, expected)
    x_TD[3:] = torch.nan
    index_TA[3:] = index_TA[2]
    assert torch.equal(triton.experts(x_TD, *weights, index_TA, weight_TA, gated=True)[2], expected)


def test_blocks_hold_each_pair_once() -> None:
    index_TA, _ = choose(70, 6, 2)
    index_TA[index_TA == 4] = 5 - index_TA[index_TA == 4] % 2  # expert 5 gets expert 4's tokens too
    index_TA = index_TA[index_TA[:, 0] != index_TA[:, 1]]
    plan = triton._plan(index_TA, 9)
    covered: list[int] = []
    for expert, first in plan.block_BF.tolist():
        if expert < 0:
            continue
        own = plan.pair_ET[expert, first : min(first + plan.height, int(plan.count_E[expert]))].tolist()
        assert own and (index_TA.flatten()[own] == expert).all()
        covered += own
    assert sorted(covered) == list(range(index_TA.numel()))
    behind = plan.block_BF[:, 0] < 0
    assert behind.any() and not behind[: int((~behind).sum())].any()


def swapped_weights(index_TA: Tensor, weight_TA: Tensor) -> tuple[Tensor, Tensor]:
    return index_TA, weight_TA.flip(-1)


def wrong_expert(index_TA: Tensor, weight_TA: Tensor) -> tuple[Tensor, Tensor]:
    index_TA = index_TA.clone()
    index_TA[-1, 0] = next(e for e in range(12) if e not in index_TA[-1].tolist())
    return index_TA, weight_TA


@pytest.mark.parametrize("mutate", [swapped_weights, wrong_expert])
@pytest.mark.parametrize("tokens", [1, 9, 20])
def test_wrong_pairs_are_seen(mutate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], tokens: int) -> None:
    x_TD, routed = draw(tokens, 16), choose(tokens, 12, 2)
    weights = draw_experts(12, 8, 16, gated=True, dtype=torch.float32)
    expected = reference.experts(x_TD, *weights, *routed, gated=True)
    with pytest.raises(AssertionError):
        assert_close(triton.experts(x_TD, *weights, *mutate(*routed), gated=True), expected)


@pytest.mark.parametrize("tokens", [3, 20])
def test_scales_in_other_places_are_seen(tokens: int) -> None:
    sizes = draw(4, 2, 2, seed=3).exp()
    up_EID, down_EDI = draw_experts(4, 70, 130, gated=True, dtype=torch.float32)
    up = fp8.quantise(up_EID * fp8.spread(sizes, up_EID.shape))
    down, x_TD, routed = fp8.quantise(down_EDI), draw(tokens, 130), choose(tokens, 4, 2)
    expected = reference.experts(x_TD, up, down, *routed, gated=True)
    assert_close(triton.experts(x_TD, up, down, *routed, gated=True), expected)
    for axis in range(3):
        moved = up._replace(scale_MK=up.scale_MK.roll(1, axis).contiguous())
        with pytest.raises(AssertionError):
            assert_close(triton.experts(x_TD, moved, down, *routed, gated=True), expected)


@dtypes
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 65), (2, 1026)])
def test_activations_equal_reference(tokens: int, width: int, dtype: torch.dtype) -> None:
    x_TI = draw(tokens, 4 * width, dtype=dtype)[:, : 2 * width]
    x_TI[0, 0] = torch.nan
    for name in ("swiglu", "geglu", "relu2"):
        found, expected = (getattr(ops, name)(x_TI) for ops in (ffn_triton, ffn_reference))
        assert found.dtype == dtype and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype], equal_nan=True)
    found, expected = (ops.swiglu(x_TI, 0.5) for ops in (ffn_triton, ffn_reference))
    torch.testing.assert_close(found, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype], equal_nan=True)
