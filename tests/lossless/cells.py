"""Cells of the capability table in float32, where rounding may decide near ties."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec import Completion
from specdec.verify.sampler import SamplingNode, TokenSampler, choice_seed, perturb
from tests.lossless.cases import SHAPES, Case, drafting_engine, generate, plain_cases, preempt_each
from tests.models.agreeing import VOCAB, write_agreeing
from tests.models.runner import Runner


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a text differs from plain decoding, and the two tokens' gap there."""

    what: str
    gap: float


class Family:
    """A family's small model, and its plain decoding outputs on one device for every feature."""

    def __init__(self, folder: Path, family: str, **fields: Any) -> None:
        self.folder, self.family, self.fields = folder, family, {"dtype": "float32", **fields}
        write_agreeing(folder, family)
        self.cases = plain_cases(folder, **self.fields)
        self.texts = 0

    def partings(self, drafter: str, shape: str, backing: str) -> Iterator[Parting]:
        """Run a drafter's cells: each feature alone, all mixed, each preempted, and each with a prefix cache.

        Yield the differences. A prompt's second run leaves a state in the cache, which the third one uses.
        """
        fields = {**self.fields, **SHAPES[shape], "slots": backing}
        alone = list({case.feature: case for case in self.cases}.values())
        batches = (("alone", alone, 512), ("mixed", self.cases, 5), ("preempted", alone, 64))
        for batch, cases, chunk in (*batches, ("kept", alone * 3, 64)):
            own = {**fields, "chunk_tokens": chunk, "prefix_cache": batch == "kept"}
            with drafting_engine(self.folder, drafter, cases, **own) as (engine, _):
                if batch == "preempted":
                    preempt_each(engine)
                asked = [[case] for case in cases] if batch in ("alone", "kept") else [cases]
                done = [choices for some in asked for choices in generate(engine, some)]
            yield from self._compare(f"{drafter} {shape} {backing} {batch}", cases, done)

    def _compare(
        self, cell: str, cases: Sequence[Case], done: Sequence[Sequence[Completion]]
    ) -> Iterator[Parting]:
        for case, own in zip(cases, done, strict=True):
            for index, (expected, found) in enumerate(zip(case.said, own, strict=True)):
                self.texts += 1
                if expected.token_ids != found.token_ids:
                    yield Parting(f"{cell}: {case.feature}", self._gap(case, index, found))

    def _gap(self, case: Case, index: int, found: Completion) -> float:
        """Return the gap between the two best tokens' perturbed float64 logits where the texts diverge."""
        said, other = case.said[index].token_ids, found.token_ids
        shortest = min(len(said), len(other))
        at = next((i for i in range(shortest) if said[i] != other[i]), shortest)
        if at == shortest:
            return float("inf")  # one text ends where the other continues: rounding cannot explain that
        runner = Runner(self.folder, torch.float64)
        tokens = [*case.prompt, *said[:at]]
        logits_V = runner.read(tokens, len(tokens))[-1]
        seed = choice_seed(case.params.seed or 0, index)
        chooser = TokenSampler(case.params, seed=seed, prompt=case.prompt, vocab=VOCAB)
        for token in said[:at]:
            chooser.observe(token)
        scores_1V = perturb(logits_V[None], [SamplingNode(chooser, len(tokens))], runner.network.kernels)
        first, second = scores_1V[0].topk(2).values.tolist()
        return float(first - second)
