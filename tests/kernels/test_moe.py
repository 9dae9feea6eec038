"""Routing against the models' own routers, including ties; experts against the token-by-token sum."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts, NemotronHTopkRouter
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts, Qwen3NextTopKRouter

from specdec.kernels.moe import cpu, reference
from specdec.kernels.native import moe as native
from specdec.kernels.native.compiled import compiled
from tests.tolerances import BFLOAT16_EQUAL, KERNEL

HIDDEN, NUM_EXPERTS = 20, 12
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare relative to the largest entry: small ones are differences of large products, each rounded."""
    assert actual.dtype == expected.dtype
    tolerance = KERNEL[expected.dtype]
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * largest)


def tied(logits_TE: Tensor) -> Tensor:
    """Round to few distinct values, so that most choices are ties."""
    return logits_TE.round()


@dtypes
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 1, 1), (1, 65, 8), (63, 7, 7), (65, 64, 3)])
def test_softmax_routing_equals_reference(
    tokens: int, num_experts: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    for logits_TE in (draw(tokens, num_experts, dtype=dtype), tied(draw(tokens, num_experts, dtype=dtype))):
        actual, expected = (
            ops.route_softmax(logits_TE, top_k, renormalise=renormalise) for ops in (cpu, reference)
        )
        assert torch.equal(actual[0], expected[0])
        # Weights may differ by one step of the logits' dtype.
        assert actual[1].dtype == expected[1].dtype == dtype
        torch.testing.assert_close(actual[1], expected[1], rtol=KERNEL[dtype], atol=0)


@dtypes
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "groups", "top_groups"),
    [(1, 8, 2, 1, 1), (1, 65, 8, 1, 1), (63, 12, 3, 4, 2), (65, 64, 6, 8, 3), (5, 12, 4, 4, 4)],
)
def test_sigmoid_routing_equals_reference(
    tokens: int,
    num_experts: int,
    top_k: int,
    groups: int,
    top_groups: int,
    renormalise: bool,
    dtype: torch.dtype,
) -> None:
    bias_E = draw(num_experts, seed=1)
    options = {"groups": groups, "top_groups": top_groups, "renormalise": renormalise, "scale": 2.5}
    options["eps"] = 1e-6 if groups == 1 else 1e-20
    for logits_TE in (draw(tokens, num_experts, dtype=dtype), tied(draw(tokens, num_experts, dtype=dtype))):
        actual, expected = (
            ops.route_sigmoid(logits_TE, bias_E, top_k, **options) for ops in (cpu, reference)
        )
        assert torch.equal(actual[0], expected[0])
        assert_close(actual[1], expected[1])


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_next, not renormalised", "qwen3_5_moe"])
def test_softmax_routing_equals_transformers(family: str, dtype: torch.dtype, ties: bool) -> None:
    settings: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 5}
    renormalise = family != "qwen3_next, not renormalised"
    router = (
        Qwen3_5MoeTopKRouter(Qwen3_5MoeTextConfig(**settings))
        if family == "qwen3_5_moe"
        else Qwen3NextTopKRouter(Qwen3NextConfig(**settings, norm_topk_prob=renormalise))
    )
    weight_ED = draw(NUM_EXPERTS, HIDDEN, seed=2)
    if ties:
        weight_ED[1::2] = weight_ED[::2]
    router.to(dtype).weight.data = weight_ED.to(dtype)
    for tokens in (1, 65):
        logits_TE, expected_TA, chosen_TA = router(draw(tokens, HIDDEN, dtype=dtype, seed=3))
        index_TA, weight_TA = cpu.route_softmax(logits_TE.detach(), 5, renormalise=renormalise)
        assert torch.equal(index_TA, chosen_TA)
        assert torch.equal(weight_TA, expected_TA)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (3, 2)])
def test_sigmoid_routing_equals_transformers(
    groups: int, top_groups: int, renormalise: bool, ties: bool
) -> None:
    router = NemotronHTopkRouter(
        NemotronHConfig(
            hidden_size=HIDDEN,
            n_routed_experts=NUM_EXPERTS,
            num_experts_per_tok=5,
            n_group=groups,
            topk_group=top_groups,
            norm_topk_prob=renormalise,
            routed_scaling_factor=2.5,
        )
    )
    weight_ED, bias_E = draw(NUM_EXPERTS, HIDDEN, seed=2), draw(NUM_EXPERTS, seed=4).mul(0.2)
    if ties:
        weight_ED[1::2], bias_E[1::2] = weight_ED[::2], bias_E[::2]
    router.weight.data, router.e_score_correction_bias.data = weight_ED, bias_E
    for tokens in (1, 65):
        logits_TE, expected_TA, chosen_TA = router(draw(tokens, HIDDEN, dtype=torch.bfloat16, seed=3))
        index_TA, weight_TA = cpu.route_sigmoid(
            logits_TE.detach(),
            bias_E,
            5,
            groups=groups,
            top_groups=top_groups,
            renormalise=renormalise,
            scale=2.5,
        )
        assert torch.equal(index_TA, chosen_TA)
        assert torch.equal(weight_TA, expected_TA)


def draw_experts(
    num_experts: int, width: int, hidden: int, *, gated: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    up_EID = draw(num_experts, width * (2 if gated else 1), hidden, seed=5).mul(hidden**-0.5)
    return up_EID.to(dtype), draw(num_experts, hidden, width, seed=6).mul(width**-0.5).to(dtype)


def choose(tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    index_TA = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)])
    return index_TA, torch.rand(tokens, top_k, generator=generator)


@dtypes
@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu2"])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "width", "hidden"),
    [
        (1, 1, 1, 1, 1),
        (1, 9, 4, 63, 65),
        (2, 3, 3, 8, 16),
        (63, 5, 2, 7, 33),
        (65, 40, 1, 16, 8),
        (200, 2, 1, 8, 8),
    ],
)
def test_experts_equal_reference(
    tokens: int, num_experts: int, top_k: int, width: int, hidden: int, gated: bool, dtype: torch.dtype
) -> None:
    x_TD = draw(tokens, hidden, dtype=dtype)
    weights = draw_experts(num_experts, width, hidden, gated=gated, dtype=dtype)
    index_TA, weight_TA = choose(tokens, num_experts, top_k)
    own: dict[str, Any] = {"gated": gated, "limit": 0.5 if width % 2 else torch.inf}
    actual, expected = (ops.experts(x_TD, *weights, index_TA, weight_TA, **own) for ops in (cpu, reference))
    assert_close(actual, expected)


@pytest.mark.skipif(compiled() is None, reason="there is no C compiler")
@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_in_c_give_a_token_the_same_bits_in_every_window(
    dtype: torch.dtype, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with more token-expert pairs than other C kernels take rows."""
    tokens, top_k = 200, 3
    x_TD, (index_TA, weight_TA) = draw(tokens, 40, dtype=dtype), choose(tokens, 5, top_k)
    weights = draw_experts(5, 28, 40, gated=gated, dtype=dtype)
    packed = [native.pack_experts(weight) for weight in weights]
    monkeypatch.setattr(native, "TOKENS", 512)
    assert tokens * top_k > native.TOKENS
    own: dict[str, Any] = {"gated": gated, "limit": 0.5}
    found = native.experts(x_TD, *packed, index_TA, weight_TA, **own)
    assert_close(found, reference.experts(x_TD, *weights, index_TA, weight_TA, **own))
    for width in (1, 2, 7, 64):
        parts = zip(*(own.split(width) for own in (x_TD, index_TA, weight_TA)), strict=True)
        apart = [native.experts(x, *packed, index, weight, **own) for x, index, weight in parts]
        assert torch.equal(torch.cat(apart), found)


@pytest.mark.parametrize("tokens", [1, 2, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_equal_transformers(dtype: torch.dtype, tokens: int) -> None:
    settings: dict[str, Any] = {"hidden_size": HIDDEN, "moe_intermediate_size": 28}
    gated = Qwen3NextExperts(
        Qwen3NextConfig(**settings, num_experts=NUM_EXPERTS, attn_implementation="eager")
    )
    plain = NemotronHExperts(NemotronHConfig(**settings, n_routed_experts=NUM_EXPERTS))
    x_TD = draw(tokens, HIDDEN, dtype=dtype)
    index_TA, weight_TA = choose(tokens, NUM_EXPERTS, 3)
    for module in (gated, plain):
        # The sums of the default implementation, which needs widths in multiples of 16 bytes.
        module.config._experts_implementation = "batched_mm"
        is_gated = module is gated
        up_EID, down_EDI = draw_experts(NUM_EXPERTS, 28, HIDDEN, gated=is_gated, dtype=dtype)
        parameter = module.gate_up_proj if is_gated else module.up_proj
        parameter.data, module.down_proj.data = up_EID, down_EDI
        # A softmax router returns its weights in the model's dtype, a sigmoid router in float32.
        given_TA = weight_TA.to(dtype) if is_gated else weight_TA
        expected = module(x_TD, index_TA, given_TA).detach()
        for ops in (cpu, reference):
            actual = ops.experts(x_TD, up_EID, down_EDI, index_TA, given_TA, gated=is_gated)
            assert_close(actual, expected)
            assert dtype == torch.float32 or (actual == expected).float().mean() >= BFLOAT16_EQUAL


@pytest.mark.parametrize("tokens", [1, 9])
def test_unrouted_experts_are_not_read(tokens: int) -> None:
    up_EID, down_EDI = draw_experts(30, 8, 16, gated=True, dtype=torch.float32)
    index_TA, weight_TA = choose(tokens, 30, 2)
    x_TD = draw(tokens, 16)
    expected = cpu.experts(x_TD, up_EID, down_EDI, index_TA, weight_TA, gated=True)
    idle_E = torch.ones(30, dtype=torch.bool)
    idle_E[index_TA.flatten()] = False
    up_EID[idle_E], down_EDI[idle_E] = torch.nan, torch.nan
    assert torch.equal(cpu.experts(x_TD, up_EID, down_EDI, index_TA, weight_TA, gated=True), expected)


def _swap_weights(index_TA: Tensor, weight_TA: Tensor) -> tuple[Tensor, Tensor]:
    return index_TA, weight_TA.flip(-1)


def _wrong_expert(index_TA: Tensor, weight_TA: Tensor) -> tuple[Tensor, Tensor]:
    index_TA = index_TA.clone()
    index_TA[-1, 0] = (index_TA[-1, 0] + 1) % 12
    return index_TA, weight_TA


@pytest.mark.parametrize("mutate", [_swap_weights, _wrong_expert])
@pytest.mark.parametrize("tokens", [1, 9])
def test_wrong_pairs_are_seen(mutate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], tokens: int) -> None:
    x_TD, routing = draw(tokens, 16), choose(tokens, 12, 2)
    weights = draw_experts(12, 8, 16, gated=True, dtype=torch.float32)
    expected = reference.experts(x_TD, *weights, *routing, gated=True)
    assert_close(cpu.experts(x_TD, *weights, *routing, gated=True), expected)
    with pytest.raises(AssertionError):
        assert_close(cpu.experts(x_TD, *weights, *mutate(*routing), gated=True), expected)
