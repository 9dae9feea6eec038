"""A warm engine has learned what its steps and drafts cost, and nothing else."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec import Completion, SamplingParams, SpecEngine
from specdec.config.tenant import SOLE
from specdec.core.loop import DecodeLoop
from specdec.draft.costs import Costs
from specdec.draft.drafter import DraftRequest
from specdec.draft.head import HeadDrafter
from specdec.draft.policy import Policy
from specdec.draft.proposal import DraftShape, Proposal
from specdec.draft.widths import WIDTHS
from specdec.draft.worth import DraftWorth
from specdec.setup import build as builder
from specdec.setup.warmup import ROUNDS, WarmupDrafter, _tried
from tests.lossless.cases import memory_for

KNOWN = 4
"""Observations before a cost estimate is trusted."""
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPTS = [[0, 1, 2, 3], [5], [7, 3, 7, 3, 7]]


Open = Callable[..., SpecEngine]


@pytest.fixture
def engine(folder: Path) -> Open:
    def make(draft: str = "auto", **fields: Any) -> SpecEngine:
        return SpecEngine(folder, **{"dtype": "float64", "max_model_len": 64, "draft": draft, **fields})

    return make


def texts(done: list[Completion]) -> list[tuple[int, ...]]:
    return [own.token_ids for own in done]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Count the measured steps by rows and tokens."""
    counts, inner = Counter[tuple[int, int]](), Costs.observe

    def observe(self: Costs, rows: int, tokens: int, seconds: float, groups: int = 1) -> None:
        counts[rows, tokens] += 1
        inner(self, rows, tokens, seconds, groups)

    monkeypatch.setattr(Costs, "observe", observe)
    return counts


@pytest.mark.parametrize("draft", ["auto", "mtp", "ngram"])
@pytest.mark.parametrize("slots", ["record", "snapshot"])
def test_every_width_is_measured_several_times(
    engine: Open, seen: Counter[tuple[int, int]], draft: str, slots: str
) -> None:
    with engine(draft, slots=slots, num_steps=4, topk=3, num_draft_tokens=13) as warm:
        policy = warm.model.loop.speculation.policy
        assert policy.bounds == warm.model.settings.bounds and policy.adaptive
        for width in (*(1 + nodes for nodes in WIDTHS if nodes < 12), 1, 13):
            assert seen[1, width] >= KNOWN and policy.steps.knows(1, width)
        for shape in policy.shapes if draft != "ngram" else ():
            assert policy.drafts[shape.topk].knows(1, shape.num_steps)
    assert {rows for rows, _ in seen} == {1}


def test_warm_up_uses_different_tokens(engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeating one token would route to the same experts, and make wide windows look cheap."""
    drafted, inner = list[Proposal](), WarmupDrafter.propose

    def propose(self: WarmupDrafter, wants: Sequence[DraftRequest]) -> list[Proposal]:
        drafted.extend(own := inner(self, wants))
        return own

    monkeypatch.setattr(WarmupDrafter, "propose", propose)
    with engine("ngram", num_steps=9, num_draft_tokens=10):
        assert max(own.num_drafted for own in drafted) == 9
        assert all(len(set(own.tree.tokens)) == len(own.tree) for own in drafted)


def test_learning_ends_when_all_is_known(engine: Open, seen: Counter[tuple[int, int]]) -> None:
    """Or after a fixed number of rounds, if something never becomes known, such as ever-new shapes."""
    with engine("mtp", num_steps=2, topk=1):
        assert KNOWN <= seen[1, 1] < 2 * 4 * ROUNDS  # three steps per round, and one-level drafts
    seen.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Costs, "knows", lambda *_: False)
        with engine("mtp", num_steps=2, topk=1):
            assert seen[1, 1] >= 2 * ROUNDS


def test_a_shapes_cost_is_its_heads_time(engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the head takes time, one second per level, other costs must not blend in."""
    now_s, inner = [0.0], HeadDrafter.propose

    def propose(self: HeadDrafter, wants: Sequence[DraftRequest]) -> list[Proposal]:
        now_s[0] += max((want.shape.num_steps for want in wants if want.shape), default=0)
        return inner(self, wants)

    monkeypatch.setattr(HeadDrafter, "propose", propose)
    monkeypatch.setattr("specdec.setup.build.time", SimpleNamespace(thread_time=lambda: now_s[0]))
    with engine("mtp", num_steps=4, topk=3, num_draft_tokens=13) as warm:
        policy = warm.model.loop.speculation.policy
        found = {s: policy.drafts[s.topk].predict(1, s.num_steps) for s in policy.shapes}
    assert found == {shape: shape.num_steps for shape in found} and len(found) == 5


@pytest.mark.parametrize("draft", ["none", "auto", "mtp", "ngram", "suffix", "self-int4"])
def test_nothing_is_held_or_counted(engine: Open, draft: str) -> None:
    with engine(draft) as warm:
        loop, stats = warm.model.loop, warm.stats()
        loop.arena.check_integrity()
        assert stats.arena.free_slabs == stats.arena.slabs
        assert (stats.steps, stats.tokens, stats.drafted, stats.accepted) == (0, 0, 0, 0)
        assert (stats.running, stats.waiting, stats.preemptions) == (0, 0, 0)
        assert not stats.limited_by and not stats.histogram and not any(stats.seconds.values())


def test_warm_up_texts_leave_no_experience(engine: Open) -> None:
    """Warm-up affects neither acceptance, beliefs, nor text that look-ups could serve to others."""
    shape = DraftShape(3, 1, 4)
    with engine("auto") as warm:
        own = warm.model.loop.speculation
        assert own.acceptance.kinds() == {}
        assert own.drafters[0] is own.head and len(own.drafters) == 2
        for drafter in own.drafters:
            assert drafter.calibrator.siblings([0.4], 1) == [0.4]
        lookup = own.drafters[1]
        made_up = [token % 64 for token in range(8)]
        want = DraftRequest("own", 1, [63, *made_up[:3]], torch.empty(0, dtype=torch.int64), shape)
        assert [own.num_drafted for own in lookup.propose([want])] == [0]
        lookup.end("own", (), None, SOLE)


@pytest.mark.parametrize("draft", ["mtp", "self-int4", "auto"])
def test_a_warm_engine_equals_a_cold_one(engine: Open, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("none") as plain:
        expected = texts(plain.generate(PROMPTS, GREEDY))
    with engine(draft) as warm:
        assert texts(warm.generate(PROMPTS, GREEDY)) == expected
    monkeypatch.setattr(builder, "warm_up", lambda *_: None)
    with engine(draft) as cold:
        assert texts(cold.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("max_model_len", [2, 3, 9, 11, 16])
@pytest.mark.parametrize("draft", ["auto", "suffix"])
def test_texts_that_end_during_warm_up_are_restarted(
    engine: Open, seen: Counter[tuple[int, int]], draft: str, max_model_len: int
) -> None:
    params = GREEDY.model_copy(update={"max_tokens": 1})
    with engine(draft, max_model_len=max_model_len) as warm:
        usage = warm.stats().arena
        assert usage.free_slabs == usage.slabs and warm.stats().steps == 0
        # The synthetic prompt leaves capacity for one or two steps, or for none.
        deepest = max_model_len - 10
        nodes = {0, *WIDTHS} & set(range(deepest + 1))
        assert all(seen[1, 1 + node] >= KNOWN for node in nodes) and bool(seen) == bool(nodes)
        assert all(KNOWN <= count < 4 * ROUNDS for count in seen.values())
        assert len(warm.generate([1], params)[0].token_ids) == 1


@pytest.mark.parametrize("slots", ["record", "snapshot"])
def test_too_little_memory_for_a_draft_is_no_hindrance(engine: Open, slots: str) -> None:
    with engine("none") as plain:
        expected = texts(plain.generate(PROMPTS, GREEDY))
    with engine("suffix") as roomy:
        layout = roomy.model.settings.layout
    memory = memory_for(layout, sequences=1, blocks=layout.blocks_for(32))
    with engine("suffix", slots=slots, max_model_len=32, memory_bytes=memory) as warm:
        usage = warm.stats().arena
        assert usage.free_slabs == usage.slabs and not warm.stats().limited_by
        assert texts(warm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize(
    ("fields", "learns"),
    [({"draft": "none"}, False), ({"draft": "mtp", "adaptive": False}, False), ({"draft": "mtp"}, True)],
)
def test_a_fixed_shape_needs_no_warm_up(
    engine: Open, fields: dict[str, Any], learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[DecodeLoop] = []
    monkeypatch.setattr(builder, "warm_up", lambda core: calls.append(core.loop))
    with engine(**fields) as made:
        assert calls == [made.model.loop] * learns


def test_an_experience_holds_whether_plans_paid(folder: Path) -> None:
    with SpecEngine(folder, draft="suffix") as engine:
        speculation = engine.model.loop.speculation
        fresh = speculation.experience()
        assert fresh.worth == DraftWorth()
        speculation.policy.worth.note(-2.0)
        tired = speculation.experience()
        assert tired.worth.trust == DraftWorth().trust - 2
        speculation.recall(fresh)
        assert speculation.policy.worth == DraftWorth()
        speculation.recall(tired)
        speculation.policy.worth.trust = 1.5
        assert tired.worth.trust == DraftWorth().trust - 2  # the saved trust is unchanged either way
        speculation.recall(None)
        assert speculation.policy.worth == DraftWorth()


def test_deep_chains_are_timed_sparsely(engine: Open) -> None:
    """Each needs separate passes: timing up to the deepest draft delayed an engine by a minute."""
    policy = Policy(DraftShape(63, 1, 64), adaptive=True)
    timed = [shape.num_steps for shape in _tried(policy)]
    assert timed[:5] == [1, 2, 3, 4, 5] and timed[-1] == 63 and len(timed) < 16
    with engine("mtp", num_steps=20, topk=1) as warm:
        policy = warm.model.loop.speculation.policy
        assert not policy.drafts[1].knows(1, 19)
        costs = [policy.drafts[1].predict(1, depth) for depth in range(1, 21)]
    assert costs == sorted(costs) and costs[-1] > 0


def test_no_compiler_of_torch_is_imported(hybrid: Path) -> None:
    script = (
        "import sys, specdec; specdec.SpecEngine(sys.argv[1]).close(); print('torch._dynamo' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(hybrid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
