"""Families that reuse frames and mixers: tensors, logits and greedy texts of random models of each.

What all families share is tested with `FAMILIES`; this tests what a family's own file declares.
"""

import inspect
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import CheckpointError
from specdec.kernels.native.compiled import compiled
from specdec.models import families
from specdec.models.checkpoint import Checkpoint
from specdec.models.feed_forward import MoE
from specdec.models.mixers import Mamba1
from specdec.setup.footprint import measure
from tests.models.agreeing import CONFIGS
from tests.models.drawn import DRAWN
from tests.models.random_checkpoints import Sample, draw, edit_config, read_tensors, save
from tests.models.runner import Runner
from tests.models.test_bfloat16 import distance
from tests.models.test_families import numbers, take_all
from tests.models.test_network import relative
from tests.selection import EXHAUSTIVE
from tests.tolerances import BFLOAT16_ASTRAY, BFLOAT16_FURTHER, BFLOAT16_UNIT, LOGITS_RELATIVE

SEEDS = range(12)
LENGTH = 70
NARROW, STEPS = 6, 24
"""Number of bfloat16 models, and of tokens that each runs."""
ROUNDS_ELSEWHERE = ("bailing_hybrid", "kimi_linear")
"""Queries of latent attention are rounded where they meet the cache. In bailing_hybrid transformers widens
the convolutions, and computes decays in the model's dtype.
"""
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Buffers in saved MiniMax models that follow from the config."""
NATIVE = "native" if compiled() else "cpu"


class Case:
    def __init__(self, family: str, seed: int, folder: Path, **how: object) -> None:
        self.folder = folder
        self.sample: Sample = draw(family, seed)
        self.model: PreTrainedModel = save(self.sample, folder, **how)  # type: ignore[arg-type]
        rng = Random(seed)
        self.tokens = [rng.randrange(self.sample.config.vocab_size) for _ in range(LENGTH)]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """Run all tokens at once, which transformers does correctly for every family."""
        found: Tensor = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return found

    def widened(self, tokens: list[int]) -> Tensor:
        """Run tokens in float32 with the same weights; the model stays in float32."""
        self.model.float()
        return self.logits(tokens)

    @torch.inference_mode()
    def decoded(self, tokens: list[int]) -> Tensor:
        """Run tokens one by one."""
        given = inspect.signature(self.model.forward).parameters
        name = next(name for name in ("cache", "cache_params", "past_key_values") if name in given)
        cache, logits = None, []
        for t, token in enumerate(tokens):
            at = {"position_ids": torch.tensor([[t]])} if "position_ids" in given else {}
            try:
                out = self.model(torch.tensor([[token]]), **{name: cache}, **at, use_cache=True)
            except ValueError:
                return self.logits(tokens)  # it decodes only hybrids, and this model drew no attention
            cache = out[name]
            logits.append(out.logits[0])
        return torch.cat(logits)


@pytest.mark.parametrize("family", DRAWN)
def test_random_configs_belong_to_the_named_family(family: str) -> None:
    """A config of a sibling's class would be saved under the sibling's type, and test its file."""
    for config in (DRAWN[family].draw(Random(0)), CONFIGS[family]()):
        assert family in families.family_of(config.to_dict()).TITLES


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", DRAWN)
def test_logits_and_greedy_text_equal_transformers(family: str, seed: int, tmp_path: Path) -> None:
    """Chunk sizes alternate between C and torch kernels; every tensor on disk is one of ours."""
    one = Case(family, seed, tmp_path)
    taken, stored = take_all(tmp_path), read_tensors(tmp_path)
    stored = {name: value for name, value in stored.items() if not name.endswith(DERIVED)}
    assert torch.equal(numbers(taken), numbers(stored))
    expected_TV = one.logits(one.tokens)
    runners = [Runner(tmp_path, torch.float32, kernels=name) for name in ("cpu", NATIVE)]
    for i, chunk in enumerate((1, 3, 7, 64)):
        found_TV = runners[(seed + i) % 2].read(one.tokens, chunk)
        assert relative(found_TV, expected_TV) < LOGITS_RELATIVE
    assert measure(runners[0].spec, torch.float32).parameters == numbers(stored).numel()
    own = runners[seed % 2].sequence()
    logits_V, said = runners[seed % 2].step([(own, one.tokens[:20])])[0][-1], []
    for _ in range(8):
        said.append(int(logits_V.argmax()))
        logits_V = runners[seed % 2].step([(own, said[-1:])])[0][-1]
    assert one.logits([*one.tokens[:20], *said])[19:-1].argmax(-1).tolist() == said


@pytest.mark.parametrize("family", DRAWN)
def test_the_reference_kernels_give_the_same_logits(family: str, tmp_path: Path) -> None:
    one = Case(family, 3, tmp_path)
    found_TV = Runner(tmp_path, torch.float32, kernels="reference").read(one.tokens[:20], 7)
    assert relative(found_TV, one.logits(one.tokens[:20])) < LOGITS_RELATIVE


@EXHAUSTIVE
@pytest.mark.parametrize("family", [name for name in DRAWN if name not in ROUNDS_ELSEWHERE])
def test_bfloat16_lies_within_the_references_own_gap(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As in test_bfloat16.py, at once and one by one.

    For Mamba-1 transformers always rounds gates, steps and states that kernels compute in float32. If our
    distance exceeds that between its prefill and decoding, we must be no further from float32.
    """
    found: dict[str, list[float]] = {"at once": [], "one by one": []}
    for seed in SEEDS[:NARROW]:
        folder = tmp_path_factory.mktemp("narrow")
        one = Case(family, seed, folder, dtype=torch.bfloat16, experts="batched_mm")
        tokens = one.tokens[:STEPS]
        prefill_TV, decode_TV = one.logits(tokens), one.decoded(tokens)
        runner = Runner(folder, torch.bfloat16, kernels=NATIVE)
        experts = any(isinstance(layer.ffn, MoE) for layer in runner.spec.layers)
        gap = max(distance(decode_TV, prefill_TV, experts=experts), BFLOAT16_UNIT)
        selective = any(isinstance(mixer, Mamba1) for mixer in runner.spec.mixers())
        exact_TV = one.widened(tokens) if selective else None
        for how, chunk, forms in (
            ("at once", STEPS, (prefill_TV,)),
            ("one by one", 1, (prefill_TV, decode_TV)),
        ):
            own_TV = runner.read(tokens, chunk)
            excess = min(distance(own_TV, form_TV, experts=experts) for form_TV in forms) / gap
            if exact_TV is not None and excess > 1:
                own, *theirs = (
                    distance(form_TV, exact_TV, experts=experts)
                    for form_TV in (own_TV, prefill_TV, decode_TV)
                )
                excess = own / max(theirs)
            found[how].append(excess)
    for excesses in found.values():
        assert sum(not one <= 1 for one in excesses) <= BFLOAT16_ASTRAY, found  # NaN exceeds the limit too


@pytest.mark.parametrize("family", ROUNDS_ELSEWHERE)
def test_bfloat16_is_as_near_to_float32_as_the_reference(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For families that round elsewhere, compare with the same bfloat16 weights run in float32."""
    further = []
    for seed in range(NARROW):
        folder = tmp_path_factory.mktemp("narrow")
        one = Case(family, seed, folder, dtype=torch.bfloat16, experts="batched_mm")
        tokens = one.tokens[:STEPS]
        runner = Runner(folder, torch.bfloat16, kernels=NATIVE)
        experts = any(isinstance(layer.ffn, MoE) for layer in runner.spec.layers)
        found = [one.logits(tokens), runner.read(tokens, STEPS), runner.read(tokens, 1)]
        one.model.float()
        exact_TV = one.logits(tokens)
        theirs, *ours = (distance(logits_TV, exact_TV, experts=experts) for logits_TV in found)
        further.append(max(ours) / theirs)
    assert statistics.mean(further) < BFLOAT16_FURTHER, further


@pytest.mark.parametrize("family", DRAWN)
def test_unsupported_option_is_refused_by_name(family: str, family_folder: Callable[..., Path]) -> None:
    config = dict(Checkpoint(family_folder(family)).config)
    families.network(config)
    for fields, culprit, remedy in DRAWN[family].REFUSED:
        with pytest.raises(CheckpointError) as refused:
            families.network(config | fields)
        assert refused.value.field == culprit and remedy in str(refused.value)


@pytest.mark.parametrize("family", DRAWN)
def test_a_config_that_does_not_mention_tying_follows_the_family(family: str, tmp_path: Path) -> None:
    one = Case(family, 1, tmp_path)
    edit_config(tmp_path, tie_word_embeddings=None)
    default = type(one.sample.config)().tie_word_embeddings
    assert families.network(Checkpoint(tmp_path).config).tied == default
