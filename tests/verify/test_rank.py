"""A drafter's top candidate is the target's choice for the drafter's logits."""

import random

import pytest
import torch
from torch import Tensor

from specdec.config.sampling import SamplingParams
from specdec.kernels.table import load_kernels
from specdec.verify.rank import rank
from specdec.verify.sampler import SamplingNode, TokenSampler, choose, perturb

VOCAB = 65
KERNELS = load_kernels("cpu")
RULES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.7),
    SamplingParams(temperature=1.3, min_p=0.1, presence_penalty=1.0, frequency_penalty=-0.5),
    SamplingParams(temperature=0.9, logit_bias={5: 3.0, 64: -100.0}),
)


def make_nodes(seed: int) -> list[SamplingNode]:
    rng, nodes = random.Random(seed), []
    for params in rng.sample(RULES, len(RULES)):
        chooser = TokenSampler(params, seed=rng.getrandbits(60), prompt=(1, 2, 3), vocab=VOCAB)
        for _ in range(rng.randrange(3)):
            chooser.observe(rng.randrange(VOCAB))
        path = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(4)))
        nodes.append(SamplingNode(chooser, rng.randrange(1000), path))
    return nodes


def make_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def plain_node(**params: float) -> SamplingNode:
    return SamplingNode(TokenSampler(SamplingParams(**params), seed=3, prompt=(1,), vocab=VOCAB), 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_the_first_is_the_targets_choice(seed: int) -> None:
    nodes, logits_NV = make_nodes(seed), make_logits(len(RULES), seed)
    ranked = rank(logits_NV, nodes, KERNELS, 4)
    assert [tokens[0] for tokens, _ in ranked] == [c.token for c in choose(logits_NV, nodes, KERNELS)]


@pytest.mark.parametrize("seed", range(6))
def test_the_second_is_the_targets_choice_without_the_first(seed: int) -> None:
    nodes, logits_NV = make_nodes(seed), make_logits(len(RULES), seed).double()
    ranked = rank(logits_NV, nodes, KERNELS, 5)
    for node, logits_V, (tokens, shares) in zip(nodes, logits_NV, ranked, strict=True):
        left_V = perturb(logits_V[None], [node], KERNELS)[0].clone()
        for token, share in zip(tokens, shares, strict=True):
            if share:  # tokens below are banned by its filters
                assert token == left_V.argmax()
            left_V[token] = -torch.inf


@pytest.mark.parametrize("seed", range(6))
def test_probabilities_follow_the_ranking_scores_and_descend(seed: int) -> None:
    nodes, logits_NV = make_nodes(seed), make_logits(len(RULES), seed)
    share_NV = perturb(logits_NV, nodes, KERNELS).softmax(-1)
    for own_V, (tokens, shares) in zip(share_NV, rank(logits_NV, nodes, KERNELS, 6), strict=True):
        assert shares == pytest.approx(own_V[tokens].tolist(), abs=1e-6)
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 1 + 1e-5
        assert len(set(tokens)) == 6


@pytest.mark.parametrize("seed", range(3))
def test_without_noise_it_is_the_likeliest_token(seed: int) -> None:
    nodes, logits_NV = make_nodes(seed), make_logits(len(RULES), seed).double()
    ranked = rank(logits_NV, nodes, KERNELS, 4, noise=False)
    elsewhere = [SamplingNode(node.chooser, node.position + 1, node.path) for node in nodes]
    assert ranked == rank(logits_NV, elsewhere, KERNELS, 4, noise=False)
    plain = plain_node(temperature=0.5)
    ((tokens, shares),) = rank(logits_NV[:1], [plain], KERNELS, 4, noise=False)
    expected = (logits_NV[0] / 0.5).softmax(-1).topk(4)
    assert tokens == expected.indices.tolist() and shares == pytest.approx(expected.values.tolist(), abs=1e-6)


def test_a_position_is_ranked_equally_in_any_batch() -> None:
    nodes, logits_NV = make_nodes(1), make_logits(len(RULES), 1)
    before_NV, together = logits_NV.clone(), rank(logits_NV, nodes, KERNELS, 3)
    for i, node in enumerate(nodes):
        tokens, shares = rank(logits_NV[i : i + 1], [node], KERNELS, 3)[0]
        assert tokens == together[i][0] and shares == pytest.approx(together[i][1], abs=1e-6)
    assert torch.equal(logits_NV, before_NV)


def test_seed_and_position_change_the_guess() -> None:
    flat_NV = torch.zeros(40, VOCAB)
    params = SamplingParams(temperature=1.0)
    seeds = [SamplingNode(TokenSampler(params, seed=seed, prompt=(), vocab=VOCAB), 5) for seed in range(40)]
    positions = [SamplingNode(seeds[0].chooser, position) for position in range(40)]
    for nodes in (seeds, positions):
        assert len({tokens[0] for tokens, _ in rank(flat_NV, nodes, KERNELS, 1)}) > 15


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_equals_the_smaller_id_is_first(dtype: torch.dtype) -> None:
    """Also if the last ranked token has an equal outside the list."""
    for seed in range(50):
        logits_NV = make_logits(4, seed).round().to(dtype)
        ranked = rank(logits_NV, [plain_node(temperature=0.0)] * 4, KERNELS, 4)
        for logits_V, (tokens, _) in zip(logits_NV.tolist(), ranked, strict=True):
            assert tokens == sorted(range(VOCAB), key=lambda v: (-logits_V[v], v))[:4]


def test_filtered_tokens_have_no_probability() -> None:
    tokens, shares = rank(make_logits(1, 3), [plain_node(temperature=0.8, top_k=2)], KERNELS, 4)[0]
    assert len(tokens) == 4 and shares[2:] == [0.0, 0.0]
    assert sum(shares) == pytest.approx(1.0, abs=1e-5)


def test_a_count_beyond_the_vocabulary_returns_all_tokens() -> None:
    tokens, shares = rank(make_logits(1, 4), [plain_node(temperature=0.0)], KERNELS, VOCAB + 9)[0]
    assert sorted(tokens) == list(range(VOCAB)) and sum(shares) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("wrong", [torch.nan, -torch.inf])
def test_nan_logits_are_never_drafted_from(wrong: float) -> None:
    """The target will fail the request by name; the earlier draft must not fail the step."""
    _, shares = rank(torch.full((1, VOCAB), wrong), [plain_node(temperature=0.0)], KERNELS, 3)[0]
    assert shares == [0.0, 0.0, 0.0]
