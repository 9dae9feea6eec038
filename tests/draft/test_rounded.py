"""A rounded copy reads what is committed, guesses behind each node's own path, and leaves no trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec import SamplingParams, SpecdecError, SpecEngine
from specdec.draft.drafter import Want
from specdec.draft.levels import Place
from specdec.draft.proposal import Proposal, Shape
from specdec.draft.rounded import RoundedDrafter, Scratch
from specdec.state_slots.backing import BACKINGS, Backing, Committed, RecordBacking
from specdec.state_slots.slots import Owner
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import RecordSlot, Row, build_window, record_ids
from tests.lossless.cases import differences, drafting_engine, generate, plain_cases
from tests.models.runner import CPU, Runner, Sequence_

FAMILIES = ("qwen3", "qwen3_5", "nemotron_h")
TEXT = [5, 17, 40, 3, 3, 28, 61, 9, 12, 33, 7, 50, 2, 2, 19, 44]
CHAIN, TREE = Shape(4, 1, 5), Shape(3, 3, 12)
EXACT = 1e-6
"""Of float64 logits: the router of Nemotron's experts rounds to float32 whatever the model's type."""


@dataclass
class Held:
    """A sequence's memory, as a request has it."""

    table_N: Tensor
    committed: Committed | None


class Bench:
    """A small model and its copy, whose guesses are the likeliest tokens; what they were made of is noted."""

    def __init__(self, folder: Path, backing: str) -> None:
        self.runner = Runner(folder, torch.float64, copied=True, slabs=80)
        assert self.runner.copy is not None
        self.backing: Backing = BACKINGS[backing](self.runner.arena)
        self.drafter = RoundedDrafter(self.runner.copy, self.backing, self.rank, CPU)
        self.ranked: dict[tuple[object, tuple[int, ...]], Tensor] = {}

    def rank(
        self, logits_NV: Tensor, at: Sequence[Place], count: int
    ) -> list[tuple[Sequence[int], Sequence[float]]]:
        self.ranked |= {
            (place.want.key, place.path): own_V for place, own_V in zip(at, logits_NV, strict=True)
        }
        best = logits_NV.softmax(-1).topk(count)
        return [*zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def begin(self, tokens: Sequence[int], chunk: int) -> tuple[Sequence_, Want]:
        """Have the target read all tokens but the last, the root of what is drafted."""
        own = self.runner.sequence()
        for at in range(0, len(tokens) - 1, chunk):
            self.runner.step([(own, tokens[at : min(at + chunk, len(tokens) - 1)])])
        held = Held(own.table_N, Committed(own.state) if self.runner.layout.states else None)
        return own, Want(own.owner, len(tokens), tokens, own.table_N, None, memory=held)

    @torch.inference_mode()
    def verify(self, own: Sequence_, want: Want, drafted: Sequence[int], accepted: int) -> Want:
        """Have the target verify a chain, of which so many nodes are kept, the root counted."""
        held, tokens = want.memory, [want.tokens[-1], *drafted]
        assert held is not None
        before = held.committed or Committed(0)
        row = Row(TokenTree.chain(tokens), own.length, own.table_N, before.state, before.path)
        slots = self.backing.begin(want.key, len(tokens))
        assert slots is not None
        window = build_window([self.backing.dress(row, slots)], self.runner.conv_width, CPU)
        self.runner.network.forward(window, self.runner.arena)
        if held.committed:
            held.committed = self.backing.promote(want.key, before, slots, range(accepted))
        own.length += accepted
        return replace(want, tokens=[*want.tokens, *drafted[: accepted - 1], 4])

    def behind(self, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Have the target read the tokens anew, and the copy the root and a path as text behind them."""
        own, _ = self.begin(tokens, chunk=5)
        assert self.runner.copy is not None
        return self.runner.step([(own, [tokens[-1], *path])], by=self.runner.copy)[0][-1]


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_node_is_guessed_behind_its_own_path(
    family_folder: Callable[..., Path], family: str, shape: Shape, backing: str
) -> None:
    """For sequences of different lengths and depths at once, one with records that are not folded yet."""
    bench = Bench(family_folder(family), backing)
    one, first = bench.begin(TEXT, chunk=4)
    first = bench.verify(one, first, [8, 9, 30], accepted=3)
    _, second = bench.begin(TEXT[5:12], chunk=3)
    wants = [replace(first, shape=shape), replace(second, shape=replace(shape, num_steps=2)), second]
    proposals = bench.drafter.propose(wants)
    assert len(proposals[0]) == shape.num_draft_tokens - 1 and max(proposals[0].depths) == shape.num_steps
    assert max(proposals[1].depths) == 2 and proposals[2] == Proposal.EMPTY
    assert len(bench.ranked) == sum(1 + (steps - 1) * shape.topk for steps in (shape.num_steps, 2))
    for (key, path), logits_V in bench.ranked.items():
        want = first if key == first.key else second
        assert (logits_V - bench.behind(want.tokens, path)).abs().max() < EXACT


def traces(bench: Bench, shape: Shape) -> set[str]:
    """Draft twice; name what is not as with a twin that drafts nothing."""
    arena, wrong = bench.runner.arena, set()
    states, logits = [], []
    for drafts in (True, False):
        own, want = bench.begin(TEXT, chunk=4)
        for drafted in ([8, 9, 30], [8, 11]):
            want = bench.verify(own, want, drafted, accepted=2)
            held = want.memory
            assert held is not None
            if drafts:
                pending, before = held.committed.path if held.committed else (), arena.held
                bench.drafter.propose([replace(want, shape=shape)])
                if before - arena.held != len(pending) or (held.committed and held.committed.path):
                    wrong.add("slots")
        if held.committed:
            path, length_B = record_ids([held.committed.path], CPU)
            own.state = held.committed.state
            bench.runner.network.materialize(arena, torch.tensor([own.state]), path, length_B)
            states.append(arena.state_bytes_X(own.state).view(torch.float64).clone())
        logits.append(bench.runner.step([(own, [1, 2, 3])])[0])
    if states and not torch.allclose(*states, rtol=0, atol=EXACT):
        wrong.add("state")
    return wrong if torch.allclose(*logits, rtol=0, atol=EXACT) else {*wrong, "logits"}


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_is_committed_changes(
    family_folder: Callable[..., Path], family: str, shape: Shape, backing: str
) -> None:
    assert traces(Bench(family_folder(family), backing), shape) == set()


def certain(patch: pytest.MonkeyPatch) -> None:
    """Write no slots: the state moves on over what was drafted."""
    patch.setattr(RecordBacking, "dress", lambda self, row, slots: row)


def keeps(patch: pytest.MonkeyPatch) -> None:
    """Keep the root's record: the target's window reads the root once more."""
    inner = RecordBacking.promote
    patch.setattr(
        RecordBacking, "promote", lambda self, owner, before, slots, _: inner(self, owner, before, slots, [0])
    )


def folds_twice(patch: pytest.MonkeyPatch) -> None:
    """Go on naming the path that the first pass has folded."""
    patch.setattr(
        RoundedDrafter,
        "_take_back",
        lambda self, draft: self.backing.arena.release_records(draft.want.key, draft.slots),
    )


def folds_in_each_pass(patch: pytest.MonkeyPatch) -> None:
    """Name the path in every pass."""
    inner = Scratch.row

    def wrong(draft: Scratch, backing: Backing) -> Row:
        return replace(inner(draft, backing), path=draft.before.path)

    patch.setattr(Scratch, "row", wrong)


@pytest.mark.parametrize("mutant", [certain, keeps, folds_twice, folds_in_each_pass])
def test_a_trace_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    bench, propose = Bench(folder, "record"), RoundedDrafter.propose

    def wrong(self: RoundedDrafter, wants: Sequence[Want]) -> list[Proposal]:
        with monkeypatch.context() as patch:
            mutant(patch)
            return propose(self, wants)

    monkeypatch.setattr(RoundedDrafter, "propose", wrong)
    assert traces(bench, CHAIN) & {"state", "logits"}
    fields = {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}
    cases = plain_cases(folder)[:4]
    with drafting_engine(folder, "self-int4", cases, **fields) as (engine, _):
        try:
            assert differences(cases, generate(engine, cases)) != []
        except SpecdecError:
            return


class Short(RecordBacking):
    """Has slots for so many nodes at once."""

    most = 0

    def begin(self, owner: Owner, nodes: int) -> Sequence[RecordSlot] | None:
        return super().begin(owner, nodes) if nodes <= self.most else None


@pytest.mark.parametrize(("slots", "depth"), [(7, 3), (6, 2), (4, 2), (3, 1), (1, 1), (0, 0)])
def test_fewer_slots_are_fewer_levels(folder: Path, slots: int, depth: int) -> None:
    bench = Bench(folder, "record")
    bench.drafter.backing = short = Short(bench.runner.arena)
    short.most = slots
    _, want = bench.begin(TEXT, chunk=4)
    (proposal,) = bench.drafter.propose([replace(want, shape=TREE)])
    assert max(proposal.depths, default=0) == depth


class Moving(RecordBacking):
    """Moves a sequence's last block while it has none of the slots yet, as where blocks are compacted."""

    held: Held

    def begin(self, owner: Owner, nodes: int) -> Sequence[RecordSlot] | None:
        *kept, last = self.held.table_N.tolist()
        (new,) = self.arena.take_blocks(owner, 1) or (0,)
        self.arena.block_bytes_X(new).copy_(self.arena.block_bytes_X(last))
        self.arena.block_bytes_X(last).fill_(0xFF)
        self.held.table_N = torch.tensor([*kept, new])
        return super().begin(owner, nodes)


def test_blocks_may_move_while_slots_are_borrowed(folder: Path) -> None:
    bench = Bench(folder, "record")
    bench.drafter.backing = moving = Moving(bench.runner.arena)
    own, want = bench.begin(TEXT, chunk=4)
    moving.held = held = Held(want.table_N[:2], Committed(own.state))
    bench.drafter.propose([replace(want, memory=held, shape=CHAIN)])
    for (_, path), logits_V in bench.ranked.items():
        assert (logits_V - bench.behind(TEXT, path)).abs().max() < EXACT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shipped_model_takes_most_of_what_its_copy_guesses(temperature: float) -> None:
    """At temperature 1 too: the copy ranks by the noise by which the target will choose."""
    prompts = ["def read_lines(path):\n", "import os\n", "class Stack:\n    def push(self, item):\n"]
    params = [
        SamplingParams(max_tokens=100, temperature=temperature, seed=i, ignore_eos=True) for i in range(3)
    ]
    with SpecEngine("tiny", draft="self-int4", num_steps=3, adaptive=False, dtype="float32") as engine:
        engine.generate(prompts, params)
        counts = engine.model.loop.counts
    print(temperature, [round(rate, 3) for rate in counts.per_depth])
    assert counts.per_depth[0] > 0.8 and counts.drafted > 150
