"""Each node's choice depends only on its request, its position and its own path."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.config.sampling import SamplingParams
from specdec.kernels.sampling import reference
from specdec.kernels.sampling.rules import NO_TOKEN, RowRule
from specdec.kernels.table import load_kernels
from specdec.state_slots.tree import TokenTree
from specdec.verify.sampler import SamplingNode, TokenSampler, choice_seed, choose
from specdec.verify.walk import walk

VOCAB = 65
KERNELS = load_kernels("cpu")


def make_chooser(seed: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> TokenSampler:
    return TokenSampler(SamplingParams(**params), seed=seed, prompt=prompt, vocab=VOCAB)


def make_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.3, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    {"temperature": 0.9, "logit_bias": {5: 3.0, 64: -100.0}, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.5, "repetition_penalty": 0.8},
)


def mixed_nodes(rng: random.Random) -> list[SamplingNode]:
    """Return nodes of requests of every kind, in random order, some deep in a tree."""
    nodes = []
    for n, params in enumerate(rng.sample(MIXED, len(MIXED))):
        chooser = make_chooser(seed=rng.getrandbits(62) - 2**61, prompt=(n, 2 * n), **params)
        for _ in range(rng.randrange(4)):
            chooser.observe(rng.randrange(VOCAB))
        path = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(4)))
        nodes.append(SamplingNode(chooser, position=rng.randrange(1000), path=path))
    return nodes


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_choice_of_a_node_ignores_the_batch(kernels: str, seed: int) -> None:
    functions = load_kernels(kernels)
    nodes, logits_NV = mixed_nodes(random.Random(seed)), make_logits(len(MIXED), seed)
    before_NV = logits_NV.clone()
    together = choose(logits_NV, nodes, functions)
    assert torch.equal(logits_NV, before_NV)
    order = random.Random(seed).sample(range(len(nodes)), len(nodes))
    shuffled = choose(logits_NV[order], [nodes[n] for n in order], functions)
    for n, node in enumerate(nodes):
        assert choose(logits_NV[n : n + 1], [node], functions) == [together[n]] == [shuffled[order.index(n)]]


def test_choice_is_the_same_with_both_kernels() -> None:
    for seed in range(5):
        nodes, logits_NV = mixed_nodes(random.Random(seed)), make_logits(len(MIXED), seed)
        by_cpu, by_reference = (choose(logits_NV, nodes, load_kernels(name)) for name in ("cpu", "reference"))
        assert [choice.token for choice in by_cpu] == [choice.token for choice in by_reference]


def test_greedy_choice_takes_the_first_of_equals() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits_NV = torch.zeros(2, VOCAB, dtype=dtype)
        logits_NV[1, 40:] = 1
        plain, biased = make_chooser(temperature=0.0), make_chooser(temperature=0.0, logit_bias={0: -1.0})
        nodes = [SamplingNode(plain, 3), SamplingNode(plain, 3)]
        assert [c.token for c in choose(logits_NV, nodes, KERNELS)] == [0, 40]
        nodes = [SamplingNode(biased, 3), SamplingNode(biased, 3)]
        assert [c.token for c in choose(logits_NV, nodes, KERNELS)] == [1, 40]


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.9}]
)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_no_filter_hides_nan(kernels: str, filters: dict[str, Any]) -> None:
    logits_NV = make_logits(3)
    logits_NV[0], logits_NV[1, 7] = torch.nan, torch.nan
    chooser = make_chooser(temperature=1.0, **filters)
    choices = choose(logits_NV, [SamplingNode(chooser, 4)] * 3, load_kernels(kernels))
    alone = choose(logits_NV[2:], [SamplingNode(chooser, 4)], load_kernels(kernels))
    assert [choice.token for choice in choices] == [NO_TOKEN, NO_TOKEN, alone[0].token]


def test_sampled_choice_is_the_best_of_scores_and_noise() -> None:
    logits_NV = make_logits(1)
    chooser = make_chooser(seed=-5, temperature=0.7, top_k=9)
    for position in range(50):
        noise_NV = reference.gumbel(torch.tensor([-5]), torch.tensor([position]), VOCAB)
        scores_NV = logits_NV / 0.7
        scores_NV[scores_NV < scores_NV.sort().values[0, -9]] = -torch.inf
        assert choose(logits_NV, [SamplingNode(chooser, position)], KERNELS)[0].token == int(
            (scores_NV + noise_NV).argmax()
        )


NUMBERS: dict[str, float] = {"temperature": 3.0, "top_k": 2, "top_p": 0.2, "min_p": 0.5}
"""A value of each numeric sampling parameter that changes texts."""


@pytest.mark.parametrize("name", RowRule._fields)
def test_each_number_of_a_request_reaches_its_choices(name: str) -> None:
    """Texts with and without drafts would also agree on a parameter that is never applied."""
    logits_NV = make_logits(1)

    def text(**params: float) -> list[int]:
        chooser = make_chooser(**{"temperature": 1.0, **params})
        return [
            choose(logits_NV, [SamplingNode(chooser, position)], KERNELS)[0].token for position in range(50)
        ]

    assert text(**{name: NUMBERS[name]}) != text()


def test_choices_differ_by_seed_by_position_and_by_choice() -> None:
    logits_NV = torch.zeros(1, VOCAB)

    def text(seed: int) -> list[int]:
        chooser = make_chooser(seed=seed)
        return [
            choose(logits_NV, [SamplingNode(chooser, position)], KERNELS)[0].token for position in range(20)
        ]

    texts = [tuple(text(choice_seed(9, index))) for index in range(5)]
    assert len(set(texts)) == 5
    assert texts[0] == tuple(text(9))
    assert len(set(texts[0])) > 10


def test_seeds_of_choices_stay_in_64_bits_and_apart() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63)]
    made = [choice_seed(seed, index) for seed in seeds for index in range(50)]
    assert len(set(made)) == len(made)
    assert all(-(2**63) <= seed < 2**63 for seed in made)
    assert [choice_seed(seed, 0) for seed in seeds] == seeds


def test_penalties_see_prompt_output_and_the_own_path() -> None:
    """Repetition counts the prompt, the others the output; drafts on the node's own path count as output."""
    flat_V = torch.zeros(VOCAB)
    flat_V[[1, 7, 9]] = 4.0
    for params, free in (
        ({"repetition_penalty": 4.0}, {0: 7, 1: 9}),
        ({"presence_penalty": 2.0}, {0: 1, 1: 1}),
        ({"frequency_penalty": 2.0}, {0: 1, 1: 1}),
    ):
        chooser = make_chooser(prompt=(1,), temperature=0.0, **params)
        nodes = [
            SamplingNode(chooser, 5),
            SamplingNode(chooser, 6, path=(7,)),
            SamplingNode(chooser, 6, path=(9, 7, 1)),
        ]
        tokens = [c.token for c in choose(flat_V.expand(3, -1), nodes, KERNELS)]
        assert tokens[:2] == [free[0], free[1]]
        # All three are penalised: with equal penalties the first of them is best again.
        assert tokens[2] == 1
        chooser.observe(1)
        assert choose(flat_V[None], [SamplingNode(chooser, 6)], KERNELS)[0].token == 7
        # An unobserved draft token has left no trace.
        assert choose(flat_V[None], [SamplingNode(chooser, 6, path=(7,))], KERNELS)[0].token == 9


def test_frequency_penalty_grows_with_each_occurrence_on_the_path() -> None:
    logits_NV = torch.zeros(1, VOCAB)
    logits_NV[0, 4] = 2.5
    chooser = make_chooser(temperature=0.0, frequency_penalty=1.0)
    for times, token in enumerate((4, 4, 4, 0)):
        assert choose(logits_NV, [SamplingNode(chooser, 9, path=(4,) * times)], KERNELS)[0].token == token


def test_logit_bias_forces_and_bans() -> None:
    logits_NV = make_logits(1)
    best = int(logits_NV.argmax())
    forced = make_chooser(temperature=1.0, logit_bias={11: 100.0})
    banned = make_chooser(temperature=0.0, logit_bias={best: -100.0})
    assert choose(logits_NV, [SamplingNode(forced, 2)], KERNELS)[0].token == 11
    assert choose(logits_NV, [SamplingNode(banned, 2)], KERNELS)[0].token == int(
        logits_NV.topk(2).indices[0, 1]
    )


def test_logprobs_are_of_the_raw_logits() -> None:
    logits_NV = make_logits(3)
    rows = [
        make_chooser(temperature=0.3, top_k=1, logit_bias={8: 100.0}, logprobs=2),
        make_chooser(temperature=0.0, logprobs=0),
        make_chooser(temperature=1.0),
    ]
    first, second, third = choose(logits_NV, [SamplingNode(chooser, 4) for chooser in rows], KERNELS)
    expected_NV = logits_NV.double().log_softmax(-1)
    assert first.token == 8
    assert first.logprob is not None and second.logprob is not None
    assert first.logprob.chosen == pytest.approx(float(expected_NV[0, 8]), abs=1e-5)
    values, ids = expected_NV[0].topk(2)
    assert [token for token, _ in first.logprob.top] == ids.tolist()
    assert [value for _, value in first.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert second.logprob.chosen == pytest.approx(float(expected_NV[1].max()), abs=1e-5)
    assert second.logprob.top == ()
    assert third.logprob is None


def test_alternatives_put_the_smaller_of_equals_first() -> None:
    logits_NV = torch.zeros(1, VOCAB)
    logits_NV[0, [3, 50]] = 1.0
    choice = choose(logits_NV, [SamplingNode(make_chooser(temperature=0.0, logprobs=4), 1)], KERNELS)[0]
    assert choice.logprob is not None
    assert [token for token, _ in choice.logprob.top] == [3, 50, 0, 1]


def a_model(path: tuple[int, ...]) -> Tensor:
    """Compute logits from a hash of the whole text so far, as a stand-in for a network."""
    mixed = 0
    for token in path:
        mixed = reference.splitmix64(mixed ^ token)
    return make_logits(1, mixed % 2**31)[0]


def continue_plainly(chooser: TokenSampler, prompt: tuple[int, ...], length: int) -> list[int]:
    """Decode one token at a time."""
    text = list(prompt)
    while len(text) < length:
        token = choose(a_model(tuple(text))[None], [SamplingNode(chooser, len(text))], KERNELS)[0].token
        chooser.observe(token)
        text.append(token)
    return text


MakeNode = Callable[[TokenSampler, int, tuple[int, ...]], SamplingNode]


def by_own_path(chooser: TokenSampler, length: int, path: tuple[int, ...]) -> SamplingNode:
    return SamplingNode(chooser, length + len(path), path)


def continue_by_trees(
    chooser: TokenSampler, truth: list[int], rng: random.Random, make_node: MakeNode = by_own_path
) -> tuple[list[int], int]:
    """Decode with random trees around the truth; also return the number of accepted drafts."""
    text, accepted = truth[:3], 0
    while len(text) < len(truth):
        tokens, parents, at = [text[-1]], [-1], 0
        for token in truth[len(text) : len(text) + rng.randrange(4)]:
            drafts = {rng.randrange(VOCAB), token} if rng.random() < 0.8 else {rng.randrange(VOCAB)}
            tokens += sorted(drafts)
            parents += [at] * len(drafts)
            at = len(tokens) - 1
        tree = TokenTree(tuple(tokens), tuple(parents))
        paths = [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(len(tree))]
        nodes = [make_node(chooser, len(text), path) for path in paths]
        logits_NV = torch.stack([a_model((*text, *path)) for path in paths])
        emitted = walk([choice.token for choice in choose(logits_NV, nodes, KERNELS)], tree).emitted
        for token in emitted:
            chooser.observe(token)
        accepted += len(emitted) - 1
        text += emitted
    return text[: len(truth)], accepted


@pytest.mark.parametrize("params", MIXED)
def test_trees_give_the_text_of_plain_decoding(params: dict[str, Any]) -> None:
    truth = continue_plainly(make_chooser(seed=4, **params), (1, 2, 3), 40)
    rng, total = random.Random(0), 0
    for _ in range(3):
        text, accepted = continue_by_trees(make_chooser(seed=4, **params), truth, rng)
        assert text == truth
        total += accepted
    assert total > 10


@pytest.mark.parametrize(
    ("params", "make_node"),
    [
        pytest.param(
            {}, lambda chooser, length, path: SamplingNode(chooser, length, path), id="position-of-the-root"
        ),
        pytest.param(
            {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
            lambda chooser, length, path: SamplingNode(chooser, length + len(path)),
            id="no-path",
        ),
    ],
)
def test_trees_with_a_wrong_node_are_caught(params: dict[str, Any], make_node: MakeNode) -> None:
    truth = continue_plainly(make_chooser(seed=4, **params), (1, 2, 3), 300)
    assert continue_by_trees(make_chooser(seed=4, **params), truth, random.Random(0))[0] == truth
    assert continue_by_trees(make_chooser(seed=4, **params), truth, random.Random(0), make_node)[0] != truth


def test_a_flat_law_is_drawn_flat() -> None:
    """Over one request's positions: chi-square with 64 degrees, above 115 by chance once in ten thousand."""
    chooser, number = make_chooser(seed=3), 4000
    choices = choose(torch.zeros(number, VOCAB), [SamplingNode(chooser, p) for p in range(number)], KERNELS)
    count_V = torch.tensor([choice.token for choice in choices]).bincount(minlength=VOCAB)
    assert float(((count_V - number / VOCAB) ** 2 / (number / VOCAB)).sum()) < 115
