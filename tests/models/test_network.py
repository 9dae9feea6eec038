"""Logits against transformers, for checkpoints written by transformers."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.kernels.native.compiled import compiled
from tests.models.random_checkpoints import FAMILIES, Sample, draw, save
from tests.models.runner import Runner
from tests.tolerances import FLOAT64_LOGITS, LOGITS_RELATIVE

SEEDS = range(12)
CHUNKS = (1, 3, 7, 64)
KERNELS = ("cpu", "native") if compiled() else ("cpu",)
LENGTH = 70


class Case:
    """One random model: the folder, transformers' own instance of it, and input tokens."""

    def __init__(self, family: str, seed: int, folder: Path) -> None:
        self.sample: Sample = draw(family, seed)
        self.folder = folder
        self.reference: PreTrainedModel = save(self.sample, folder)
        rng = Random(seed)
        vocab = self.sample.config.vocab_size
        self.tokens = [rng.randrange(vocab) for _ in range(LENGTH)]

    @torch.inference_mode()
    def expected(self) -> Tensor:
        logits: Tensor = self.reference(torch.tensor([self.tokens]), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Case]:
    made: dict[tuple[str, int], Case] = {}

    def make(family: str, seed: int) -> Case:
        if (family, seed) not in made:
            made[family, seed] = Case(family, seed, tmp_path_factory.mktemp("model"))
        return made[family, seed]

    return make


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_chunks_of_any_size(
    case: Callable[[str, int], Case], family: str, seed: int, kernels: str
) -> None:
    one = case(family, seed)
    expected = one.expected()
    runner = Runner(one.folder, torch.float32, kernels=kernels)
    for chunk in CHUNKS:
        assert relative(runner.read(one.tokens, chunk), expected) < LOGITS_RELATIVE


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(case: Callable[[str, int], Case], family: str, seed: int) -> None:
    """Greedy decoding runs on its own cache; transformers recomputes the prefix for each token."""
    one = case(family, seed)
    runner = Runner(one.folder, torch.float32, kernels=KERNELS[-1])
    own = runner.sequence()
    logits_V = runner.step([(own, one.tokens[:20])])[0][-1]
    said: list[int] = []
    for _ in range(12):
        said.append(int(logits_V.argmax()))
        logits_V = runner.step([(own, said[-1:])])[0][-1]
    with torch.inference_mode():
        ids = torch.tensor([one.tokens[:20] + said])
        expected_TV = one.reference(ids, use_cache=False).logits[0, 19:-1]
    assert expected_TV.argmax(-1).tolist() == said


@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_mixed_window_equal_the_rows_alone(
    case: Callable[[str, int], Case], family: str, seed: int
) -> None:
    one = case(family, seed)
    runner = Runner(one.folder, torch.float64)
    expected = runner.read(one.tokens, LENGTH)
    rng = Random(seed)
    rows = [runner.sequence() for _ in range(5)]
    while any(row.length < LENGTH for row in rows):
        takes = [(row, rng.choice([0, 1, 1, 2, 9, 33])) for row in rows]
        parts = [
            (row, one.tokens[row.length : row.length + count])
            for row, count in takes
            if count and row.length < LENGTH
        ]
        if not parts:
            continue
        starts = [row.length for row, _ in parts]
        for logits_TV, start in zip(runner.step(parts), starts, strict=True):
            torch.testing.assert_close(
                logits_TV, expected[start : start + len(logits_TV)], rtol=FLOAT64_LOGITS, atol=FLOAT64_LOGITS
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_kernels_give_the_same_logits(case: Callable[[str, int], Case], family: str) -> None:
    one = case(family, 0)
    found = Runner(one.folder, torch.float64, kernels="reference").read(one.tokens[:30], 7)
    expected = Runner(one.folder, torch.float64).read(one.tokens[:30], 7)
    torch.testing.assert_close(found, expected, rtol=FLOAT64_LOGITS, atol=FLOAT64_LOGITS)


def test_a_network_with_one_wrong_weight_is_noticed(case: Callable[[str, int], Case]) -> None:
    """The mutant: with too wide a tolerance, a single altered norm would pass."""
    one = case("qwen3_5", 1)
    runner = Runner(one.folder, torch.float32)
    runner.network.norm_D[0] += 0.05
    assert relative(runner.read(one.tokens, 7), one.expected()) > LOGITS_RELATIVE
