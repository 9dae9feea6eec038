"""A draft token that causes NaN: plain decoding never computes it, so it must not matter."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import DraftRequest, StatelessDrafter
from specdec.draft.proposal import Proposal
from specdec.errors import EngineError
from specdec.state_slots.tree import TokenTree
from tests.models.representatives import REPRESENTATIVES

POISON = 62
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logit_bias={POISON: -100.0})
FIELDS = {"draft": "ngram", "adaptive": False, "num_steps": 2, "topk": 2, "num_draft_tokens": 4}


class Poisoner(StatelessDrafter):
    """Draft the poison token beside the true token, and below it."""

    def __init__(self, text: Sequence[int]) -> None:
        self.calibrator, self.text, self.drafts = Calibrator(), text, 0

    def propose(self, wants: Sequence[DraftRequest]) -> list[Proposal]:
        """Put the true token last, so that the poison precedes it in the window."""
        return [self._propose(w) if w.shape else Proposal.bare(w.tokens[-1]) for w in wants]

    def _propose(self, want: DraftRequest) -> Proposal:
        self.drafts += 1
        said = len(want.tokens) - want.prompt_length
        right = self.text[said] if said < len(self.text) else 1
        tree = TokenTree((want.tokens[-1], POISON, right, POISON), (-1, 0, 0, 2))
        return Proposal(tree, (1.0, 0.5, 0.4, 0.3))


@pytest.fixture(scope="module", params=REPRESENTATIVES)
def folder(request: pytest.FixtureRequest, family_folder: Callable[..., Path]) -> Path:
    return family_folder(request.param)


def poisoned(engine: SpecEngine, value: float) -> SpecEngine:
    engine.model.network.embed_VD[POISON] = value
    return engine


@pytest.mark.parametrize("backing", ["record", "snapshot"])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_rejected_nan_draft_changes_nothing(folder: Path, kernels: str, backing: str) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    with SpecEngine(folder, dtype="float64", kernels=kernels, draft="none", max_model_len=64) as engine:
        expected = [c.token_ids for c in poisoned(engine, float("nan")).generate(prompts, PARAMS)]
    with SpecEngine(
        folder, dtype="float64", kernels=kernels, slots=backing, max_model_len=64, **FIELDS
    ) as engine:
        speculation = engine.model.loop.speculation
        speculation.drafters.clear()
        speculation.add_drafter(poisoner := Poisoner(expected[0]))
        for value in (float("nan"), float("inf")):
            found = poisoned(engine, value).generate(prompts, PARAMS)
            assert [c.token_ids for c in found] == expected
        assert poisoner.drafts > 4
        engine.model.loop.arena.check_integrity()


def test_tokens_before_a_nan_are_still_emitted(folder: Path) -> None:
    """With drafts the failure occurs at the same token as without, after emitting those before it."""
    with SpecEngine(folder, dtype="float64", draft="none", max_model_len=64) as engine:
        asked = [[1 + i, 2 + 3 * i % 11, 3] for i in range(40)]
        said_plainly = zip(asked, engine.generate(asked, PARAMS), strict=True)
    prompt, plain, fatal = next(
        (prompt, own, token)
        for prompt, own in said_plainly
        for i, token in enumerate(own.token_ids)
        if i > 1 and token not in [*prompt, *own.token_ids[:i]]
    )
    at = plain.token_ids.index(fatal)
    with SpecEngine(folder, dtype="float64", max_model_len=64, **FIELDS) as engine:
        engine.model.network.embed_VD[fatal] = float("nan")
        speculation = engine.model.loop.speculation
        speculation.drafters.clear()
        speculation.add_drafter(Poisoner(plain.token_ids))
        said: list[int] = []
        submitted = engine.stream(prompt, PARAMS)

        async def listen() -> None:
            async for delta in submitted:
                said.extend(delta.token_ids)

        with pytest.raises(EngineError, match="NaN"):
            asyncio.run(listen())
        assert said == list(plain.token_ids[: at + 1])
        engine.model.loop.arena.check_integrity()
