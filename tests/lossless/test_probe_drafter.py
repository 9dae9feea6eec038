"""A drafter from outside the package: registered by a user, lossless, beside others and alone.

All its code is in this file. `docs/architecture.md` explains how to add a drafter to the package.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.config.drafters import DRAFTER_OPTIONS, DrafterOption
from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import DraftRequest, StatelessDrafter
from specdec.draft.proposal import DraftShape, Proposal
from specdec.errors import ConfigError
from specdec.setup.drafters import DRAFTERS, DrafterSpec
from specdec.state_slots.tree import TokenTree

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "tree": {"num_steps": 3, "topk": 2, "num_draft_tokens": 8},
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7]]
PARAMS = [
    SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=48, temperature=0.8, seed=3, ignore_eos=True, logit_bias={4: 3.0, 9: 3.0}),
]


class Followers(StatelessDrafter):
    """Draft the tokens that followed the last token before, most recent first."""

    def __init__(self) -> None:
        self.calibrator = Calibrator()
        self.proposed = 0
        self.flushed: list[str | None] = []

    def flush(self, caller: str | None = None) -> None:
        self.flushed.append(caller)

    def propose(self, wants: Sequence[DraftRequest]) -> list[Proposal]:
        found = [
            self._grow(want.tokens, want.shape) if want.shape else Proposal.bare(want.tokens[-1])
            for want in wants
        ]
        self.proposed += sum(own.num_drafted for own in found)
        return found

    def _grow(self, tokens: Sequence[int], shape: DraftShape) -> Proposal:
        followers: dict[int, list[int]] = defaultdict(list)
        for before, after in zip(reversed(tokens[:-1]), reversed(tokens[1:]), strict=True):
            if after not in followers[before]:
                followers[before].append(after)
        nodes = [(tokens[-1], -1, 1.0)]
        level = [(0, tokens[-1], 1.0)]
        for _ in range(shape.num_steps):
            below = []
            for parent, token, score in level:
                for child in followers[token][: shape.topk]:
                    below.append((len(nodes), child, score * 0.8))
                    nodes.append((child, parent, score * 0.8))
            level = below
        drafted, parents, scores = zip(*nodes, strict=True)
        return Proposal(TokenTree(drafted, parents), scores).best(shape.num_draft_tokens)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Followers]:
    """Register the drafter, and return all its instances."""
    drafters: list[Followers] = []

    def make(_: object) -> Followers:
        drafters.append(Followers())
        return drafters[-1]

    monkeypatch.setitem(DRAFTER_OPTIONS, "followers", DrafterOption("what followed the last token before"))
    monkeypatch.setitem(DRAFTERS, "followers", DrafterSpec(make, in_auto=True))
    return drafters


def texts(folder: Path, **fields: Any) -> tuple[list[Sequence[int]], int]:
    """Return the outputs of all prompts and parameters, and the number of accepted draft tokens."""
    with SpecEngine(folder, dtype="float64", **fields) as engine:
        done = [answer for params in PARAMS for answer in engine.generate(PROMPTS, params)]
    accepted = sum(own.stats.accepted for own in done)
    return [own.token_ids for own in done], accepted


@pytest.mark.parametrize("draft", ["followers", "auto"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("graphs", [False, True])
def test_texts_equal_those_without_a_drafter(
    folder: Path, made: list[Followers], draft: str, shape: str, graphs: bool
) -> None:
    expected, _ = texts(folder, draft="none")
    fields = {"draft": draft, "adaptive": False, "graphs": graphs, **SHAPES[shape]}
    said, accepted = texts(folder, **fields)
    assert said == expected and accepted > 0
    assert made
    assert all(own.proposed for own in made)


def test_a_drafters_data_of_a_caller_is_flushed(folder: Path, made: list[Followers]) -> None:
    with SpecEngine(folder, draft="followers", dtype="float64") as engine:
        engine.begin_flush("alice").result()
        engine.flush()
        assert made[-1].flushed == ["alice", None]


def test_a_name_that_is_not_registered_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="draft cannot be 'followers'; give auto, none, mtp"):
        SpecEngine(folder, draft="followers")
