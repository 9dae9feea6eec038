"""The active drafter and the reason, as reported in an engine's statistics."""

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.draft.acceptance import TrackRecord
from specdec.draft.decision import DraftDecision
from specdec.draft.proposal import DraftShape
from specdec.draft.uniform import UniformPolicy

PROMPT = "class Parser:\n    def "


def test_without_drafters_or_a_decision_nothing_is_told() -> None:
    with SpecEngine("tiny", draft="none") as engine:
        engine.generate(PROMPT, SamplingParams(max_tokens=4))
        assert engine.stats().speculation is None


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_that_are_fixed_are_called_so(graphs: bool) -> None:
    with SpecEngine("tiny", draft="mtp", adaptive=False, topk=1, num_steps=3, graphs=graphs) as engine:
        engine.generate(PROMPT, SamplingParams(max_tokens=8))
        told = engine.stats().speculation
    assert told and (told.name, told.tokens, told.cost) == ("a chain of 3", None, None)
    assert told.reason == "a chain of 3 in every step, whether it pays or not: adaptive is off"


@pytest.mark.parametrize("graphs", [False, True])
def test_what_was_decided_is_told_with_its_figures(graphs: bool) -> None:
    with SpecEngine("tiny", draft="mtp", graphs=graphs) as engine:
        engine.generate(PROMPT, SamplingParams(max_tokens=128, temperature=0, ignore_eos=True))
        told = engine.stats().speculation
    assert told and told.tokens and told.cost and told.tokens >= 1 and told.cost > 0
    assert (told.name == "none") == told.reason.startswith("drafting is off: ")
    assert f"{told.tokens:.2f} tokens per step, at {told.cost:.2f} x the time" in told.reason


def test_reasons_by_hand() -> None:
    chain, tree = DraftShape(2, 1, 3), DraftShape(3, 4, 8)
    assert DraftDecision(True, tree, 2.5, 1.25).reason == (
        "a tree of 7, 3 deep is expected to give 2.50 tokens per step, at 1.25 x the time of a step "
        "without drafts"
    )
    assert DraftDecision(True, None, 2.5, 1.25).name == "a looked-up draft"
    merged = DraftDecision(False, DraftShape(1, 1, 2), 2.8, 3.1, looked_up=True).reason
    assert merged.startswith("drafting is off: a chain of 1 with a looked-up draft would give 2.80 tokens")
    off = DraftDecision(False, chain, 1.1, 1.3)
    assert (off.name, off.reason) == (
        "none",
        "drafting is off: a chain of 2 would give 1.10 tokens per step, at 1.30 x the time of a step "
        "without drafts",
    )
    assert DraftDecision(False, chain, 2.0, 1.3, active=False).reason.endswith(
        "estimates were too high recently"
    )


@pytest.mark.parametrize(("cost", "pays"), [(1.2, True), (9.0, False)])
def test_steps_of_the_device_are_judged_by_what_they_took(cost: float, pays: bool) -> None:
    """All drafts are accepted: a chain of one gives two tokens per step."""
    policy, track = UniformPolicy(DraftShape(1, 1, 2), adaptive=True), TrackRecord()
    for _ in range(40):
        shape = policy.choose([track])
        policy.observe(shape, 1, cost if shape else 1.0)
        if shape:
            track.observe(shape, 1, 1)
    told = policy.outlook
    assert told and told.drafts == pays and told.name == ("a chain of 1" if pays else "none")
    assert told.cost == pytest.approx(cost) and told.tokens == pytest.approx(2, abs=0.2)
