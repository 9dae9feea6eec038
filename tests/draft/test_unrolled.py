"""A chain drafted in one pass equals the chain drafted level by level, for every sampling method."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.draft.drafter import DraftRequest
from specdec.draft.proposal import Proposal
from specdec.kernels.native.compiled import compiled
from specdec.models.replay import Recorded
from specdec.models.unrolled import Unrolled
from specdec.state_slots.window import Window
from tests.selection import only

PROMPTS = ["import os\n", 'def f(x):\n    """Return', "class A:\n", "# The licence"]
GREEDY, WARM = {"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}
FILTERED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
PENALISED = {"temperature": 0.7, "frequency_penalty": 0.5}
RULES: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY] * 4,
    "warm": [WARM] * 4,
    "filtered": [FILTERED] * 4,
    "penalised": [PENALISED] * 4,
    "mixed": [GREEDY, FILTERED, WARM, GREEDY],
    "beside": [GREEDY, PENALISED, WARM, FILTERED],
}
"""The rows' sampling parameters, by case."""


Made = dict[Any, list[tuple[Any, ...]]]
"""By request, its proposals: tokens, parents and beliefs. Scores learn from all requests in order."""


def drafts(
    rules: str, *, straight: bool, count: int, prompts: Sequence[str] = PROMPTS, **fields: Any
) -> tuple[list[Any], Made, int, int]:
    """Return the outputs, each request's proposals, the single-pass chains, and the tapes."""
    made: Made = {}
    with SpecEngine("tiny", adaptive=False, topk=1, graphs=False, max_model_len=512, **fields) as engine:
        head = engine.model.loop.speculation.head
        assert head and head.straight
        propose, unrolled, passes = head.propose, head.straight.unrolled, [0]
        assert isinstance(unrolled, Unrolled)

        def watched(wants: Sequence[DraftRequest]) -> list[Proposal]:
            found = propose(wants)
            for want, proposal in zip(wants, found, strict=True):
                made.setdefault(want.key, []).append(
                    (proposal.tree.tokens, proposal.tree.parents, proposal.beliefs)
                )
            return found

        def counted(window: Window, *given: Any) -> Any:
            passes[0] += 1
            return unrolled(window, *given)

        head.straight = replace(head.straight, unrolled=counted) if straight else None
        head.propose = watched  # type: ignore[method-assign]
        params = [
            SamplingParams(max_tokens=32, seed=i, ignore_eos=True, **rule)
            for i, rule in enumerate(RULES[rules][:count])
        ]
        done = engine.generate(prompts[:count], params)
        tapes = [form for own in unrolled._replays._by_memory.values() for form in own._by_key.values()]
    played = sum(isinstance(form, Recorded) for form in tapes)
    return [own.token_ids for own in done], made, passes[0], played


@pytest.mark.parametrize("rules", only({"greedy", "mixed", "beside"}, RULES))
@pytest.mark.parametrize(
    ("draft", "count", "dtype"),
    [("mtp", 1, "bfloat16"), ("mtp", 4, "bfloat16"), ("mtp", 4, "float32"), ("eagle", 2, "float32")],
)
def test_one_pass_drafts_what_levels_draft(draft: str, rules: str, count: int, dtype: str) -> None:
    """Unless a row is drafted separately, which changes the width of the batch's products."""
    fields = {"draft": draft, "num_steps": 4, "dtype": dtype}
    by_level = drafts(rules, straight=False, count=count, **fields)
    at_once = drafts(rules, straight=True, count=count, **fields)
    assert at_once[:2] == by_level[:2]
    assert by_level[2] == 0 and (at_once[2] > 5) == (rules != "penalised")


@pytest.mark.skipif(compiled() is None, reason="no C compiler was found")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("draft", "rules"), [("mtp", "greedy"), ("mtp", "warm"), ("eagle", "warm")])
def test_chains_are_played_from_tapes(draft: str, rules: str, dtype: str) -> None:
    found = drafts(rules, straight=True, count=1, draft=draft, num_steps=4, dtype=dtype)
    assert found[2] > 5 and found[3] > 0


def test_one_that_minds_what_it_said_keeps_no_other_from_it() -> None:
    at_once = drafts("beside", straight=True, count=4, draft="mtp", num_steps=4)
    by_level = drafts("beside", straight=False, count=4, draft="mtp", num_steps=4)
    assert at_once[2] > 10 and at_once[:2] == by_level[:2]


def test_a_chain_is_drafted_alike_at_every_length() -> None:
    """A tape recorded at one length is replayed at others."""
    long = ["x = [1, 2, 3]\n" * 40]
    fields = {"count": 1, "draft": "mtp", "num_steps": 7, "dtype": "bfloat16"}
    for cut in range(0, 24, 3):
        text = [long[0][: 14 * 31 + cut]]
        wanted, found = (drafts("greedy", straight=own, prompts=text, **fields) for own in (False, True))
        assert found[:2] == wanted[:2]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_steps": 1},
        {"num_steps": 7},
        {"num_steps": 4, "draft_window": 20},
        {"num_steps": 4, "draft_vocab": 600},
        {"num_steps": 4, "draft_noise": False},
        {"num_steps": 4, "dtype": "float64"},
        {"num_steps": 4, "kernels": "cpu"},
    ],
    ids=str,
)
def test_so_it_does_whatever_the_head_is_told(fields: dict[str, Any]) -> None:
    by_level, at_once = (
        drafts("mixed", straight=own, count=2, draft="mtp", **fields) for own in (False, True)
    )
    assert at_once[0] == by_level[0] and at_once[2] > 5
    assert at_once[1].keys() == by_level[1].keys()
    for key in by_level[1]:
        for (*found, found_beliefs), (*wanted, beliefs) in zip(
            at_once[1][key], by_level[1][key], strict=True
        ):
            # A window starts at a block boundary: deeper levels may see more of it.
            depth = 1 if "draft_window" in fields else len(beliefs)
            assert [part[:depth] for part in found] == [part[:depth] for part in wanted]
            assert found_beliefs[:depth] == pytest.approx(beliefs[:depth], rel=1e-4)
