"""A chain drafted in one pass is the chain that is drafted level by level, in every way a token is chosen."""

from collections.abc import Sequence
from typing import Any

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.draft.drafter import Want
from specdec.draft.proposal import Proposal

PROMPTS = ["import os\n", 'def f(x):\n    """Return', "class A:\n", "# The licence"]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"temperature": 0.7, "frequency_penalty": 0.5},
    "mixed": {},
}
EACH = [RULES["greedy"], RULES["warm"], RULES["filtered"], RULES["greedy"]]


def drafts(rules: str, *, straight: bool, count: int, **fields: Any) -> tuple[list[Any], list[Proposal], int]:
    """Return what was said, every proposal that was made, and how many passes made chains."""
    made: list[Proposal] = []
    with SpecEngine("tiny", adaptive=False, topk=1, max_model_len=256, **fields) as engine:
        head = engine.model.loop.speculation.head
        assert head and head.straight
        propose, unrolled, passes = head.propose, head.straight.unrolled, [0]

        def watched(wants: Sequence[Want]) -> list[Proposal]:
            found = propose(wants)
            made.extend(found)
            return found

        def counted(*given: Any) -> Any:
            passes[0] += 1
            return unrolled(*given)

        object.__setattr__(head.straight, "unrolled", counted)
        head.propose = watched  # type: ignore[method-assign]
        if not straight:
            head.straight = None
        params = [
            SamplingParams(max_tokens=32, seed=i, ignore_eos=True, **(RULES[rules] or EACH[i]))
            for i in range(count)
        ]
        done = engine.generate(PROMPTS[:count], params)
    return [own.token_ids for own in done], made, passes[0]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("draft", "count"), [("mtp", 1), ("mtp", 4), ("eagle", 2)])
def test_one_pass_drafts_what_levels_draft(draft: str, rules: str, count: int) -> None:
    fields = {"draft": draft, "num_steps": 4}
    by_level = drafts(rules, straight=False, count=count, **fields)
    at_once = drafts(rules, straight=True, count=count, **fields)
    assert at_once[:2] == by_level[:2]
    assert by_level[2] == 0 and (at_once[2] > 5) == (rules != "penalised")


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
    rules = "greedy" if fields.get("draft_noise") is False else "warm"
    by_level, at_once = (drafts(rules, straight=own, count=2, draft="mtp", **fields) for own in (False, True))
    assert at_once[0] == by_level[0] and at_once[2] > 5
    if "draft_window" in fields:  # which begins with whole blocks: deeper levels may see one more
        return
    for found, wanted in zip(at_once[1], by_level[1], strict=True):
        assert (found.tokens, found.parents) == (wanted.tokens, wanted.parents)
        assert found.scores == pytest.approx(wanted.scores, rel=1e-4)
