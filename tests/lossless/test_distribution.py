"""The distribution of sampled tokens, by exact enumeration and a chi-square test.

Equality with plain decoding would not detect an error common to both; this test counts outcomes.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SamplingParams, SpecEngine
from specdec.core.batch import ScheduledRequest
from specdec.core.loop import DecodeLoop
from specdec.kernels.table import Kernels
from specdec.verify import sampler as choosing
from specdec.verify.sampler import Logprob, SampledToken, SamplingNode
from specdec.verify.walk import AcceptedPath
from tests.models.runner import Runner
from tests.selection import EXHAUSTIVE, only

PROMPT, TEMPERATURE = [4, 1, 2], 2.0
VOCAB = 8
SAMPLES = 4000
SIGNIFICANCE = 1e-3
"""Probability of rejecting a correct engine with new seeds."""
POWER = 0.999
"""Minimum probability of rejecting the mutant; see `power` for the estimate."""
LEAST = 5.0
"""Outcomes with a smaller expected count are merged."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "chain": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "tree": {"num_steps": 3, "topk": 3, "num_draft_tokens": 10},
}
Outcome = tuple[int, ...]


@pytest.fixture(scope="module")
def folder(family_folder: Callable[..., Path]) -> Path:
    return family_folder("qwen3_5", vocab=VOCAB)


@pytest.fixture(scope="module")
def distribution(folder: Path) -> Mapping[Outcome, float]:
    """Enumerate the first three tokens by the target's softmax, prefix by prefix."""
    runner = Runner(folder, torch.float64, slabs=80)

    def following(path: Outcome) -> list[float]:
        logits_V = runner.read([*PROMPT, *path], 64)[-1]
        shares: list[float] = (logits_V / TEMPERATURE).softmax(-1).tolist()
        return shares

    chances: dict[Outcome, float] = {(): 1.0}
    for _ in range(3):
        chances = {
            (*path, token): above * chance
            for path, above in chances.items()
            for token, chance in zip(range(VOCAB), following(path), strict=True)
        }
    assert len(chances) == VOCAB**3 and math.isclose(sum(chances.values()), 1.0)
    return chances


def draw(folder: Path, shape: Mapping[str, Any]) -> Counter[Outcome]:
    """Sample the first tokens with drafts, varying only the seed."""
    with SpecEngine(
        folder, draft="mtp", adaptive=False, dtype="float32", max_model_len=16, chunk_tokens=512, **shape
    ) as engine:
        params = [
            SamplingParams(max_tokens=5, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
            for seed in range(SAMPLES)
        ]
        done = engine.generate([PROMPT] * SAMPLES, params)
        assert engine.model.loop.counts.accepted > SAMPLES / 2
    return Counter(own.token_ids[:3] for own in done)


def chi_square(counts: Counter[Outcome], distribution: Mapping[Outcome, float]) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom."""
    assert set(counts) <= set(distribution)
    often = [path for path, chance in distribution.items() if chance * SAMPLES >= LEAST]
    expected = [distribution[path] * SAMPLES for path in often]
    found = [counts[path] for path in often]
    if (rest := SAMPLES - sum(expected)) >= LEAST:
        expected.append(rest)
        found.append(SAMPLES - sum(found))
    return sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True)), len(expected) - 1


def p_value(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def power(statistic: float, freedom: int) -> float:
    """Estimate the probability that a mutant with this statistic is rejected.

    Its noncentrality is the statistic minus the degrees of freedom; the noncentral chi-square is approximated
    by a normal distribution with its mean and variance.
    """
    critical = next(x for x in itertools.count(freedom) if p_value(x, freedom) < SIGNIFICANCE)
    beyond = max(statistic - freedom, 0.0)
    spread = math.sqrt(2 * (freedom + 2 * beyond))
    return 0.5 * math.erfc((critical - freedom - beyond) / spread / math.sqrt(2))


@EXHAUSTIVE
@pytest.mark.parametrize("shape", only({"chain"}, SHAPES))
def test_the_distribution_with_drafts_is_the_targets(
    folder: Path, distribution: Mapping[Outcome, float], shape: str
) -> None:
    statistic, freedom = chi_square(draw(folder, SHAPES[shape]), distribution)
    print(f"{shape}: chi-square {statistic:.1f} of {freedom}, p = {p_value(statistic, freedom):.3f}")
    assert freedom > 40
    assert p_value(statistic, freedom) > SIGNIFICANCE


@EXHAUSTIVE
@pytest.mark.parametrize("shape", only({"chain"}, SHAPES))
def test_accepting_the_second_best_is_rejected(
    folder: Path, distribution: Mapping[Outcome, float], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a draft is accepted if it is among the target's two best tokens."""
    monkeypatch.setattr("specdec.core.loop.choose", choose_with_second)
    monkeypatch.setattr(DecodeLoop, "_walk", walk_by_two)
    statistic, freedom = chi_square(draw(folder, SHAPES[shape]), distribution)
    print(f"{shape}: chi-square {statistic:.1f} of {freedom}, power {power(statistic, freedom):.6f}")
    assert p_value(statistic, freedom) < SIGNIFICANCE
    assert power(statistic, freedom) > POWER


def choose_with_second(
    logits_NV: Tensor, nodes: Sequence[SamplingNode], kernels: Kernels
) -> list[SampledToken]:
    """Choose as usual, and store each node's second best token in place of its log-probability."""
    best_N2 = choosing.perturb(logits_NV, nodes, kernels).topk(2).indices.tolist()
    return [SampledToken(first, Logprob(float(second), ())) for first, second in best_N2]


def walk_by_two(self: DecodeLoop, row: ScheduledRequest, choices: dict[int, SampledToken]) -> AcceptedPath:
    if not row.is_drafted:
        return AcceptedPath(tuple(range(len(row.tree))), tuple(c.token for c in choices.values()))
    nodes, emitted = [0], list[int]()
    while True:
        choice = choices[nodes[-1]]
        assert choice.logprob is not None
        children = {row.tree.tokens[n]: n for n in range(len(row.tree)) if row.tree.parents[n] == nodes[-1]}
        taken = next((t for t in (choice.token, int(choice.logprob.chosen)) if t in children), None)
        if taken is None:
            return AcceptedPath(tuple(nodes), (*emitted, choice.token))
        nodes.append(children[taken])
        emitted.append(taken)
