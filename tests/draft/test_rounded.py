"""A quantized copy drafts from committed tokens and its own guesses, and leaves no trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec import SamplingParams, SpecEngine
from specdec.draft.drafter import DraftRequest
from specdec.draft.levels import DraftPosition
from specdec.draft.proposal import DraftShape
from specdec.draft.rounded import ChainContinuation, RoundedDrafter
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import BACKINGS, Backing, CommittedState
from specdec.state_slots.slots import Owner
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window, record_ids
from tests.lossless.cases import SHAPES, differences, drafting_engine, generate, plain_cases
from tests.models.runner import CPU, Runner, Sequence_

FAMILIES = ("qwen3", "qwen3_5", "nemotron_h")
TEXT = [5, 17, 40, 3, 3, 28, 61, 9, 12, 33, 7, 50, 2, 2, 19, 44]
CHAIN = DraftShape(4, 1, 5)
EXACT = 1e-6
"""For float64 logits: the router of Nemotron's experts uses float32 whatever the model's dtype."""


@dataclass
class Held:
    """A sequence's memory, as held by a request."""

    table_N: Tensor
    committed: CommittedState | None


class Bench:
    """A small model and its copy, whose guesses are the likeliest tokens; their logits are recorded."""

    def __init__(self, folder: Path, backing: str) -> None:
        self.runner = Runner(folder, torch.float64, copied=True, slabs=80)
        assert self.runner.copy is not None
        self.backing: Backing = BACKINGS[backing](self.runner.arena)
        self.drafter = RoundedDrafter(self.runner.copy, self.runner.arena, self.rank, CPU)
        self.ranked: dict[tuple[object, tuple[int, ...]], Tensor] = {}

    def rank(
        self, logits_NV: Tensor, at: Sequence[DraftPosition], count: int
    ) -> list[tuple[Sequence[int], Sequence[float]]]:
        self.ranked |= {
            (place.want.key, place.path): own_V for place, own_V in zip(at, logits_NV, strict=True)
        }
        best = logits_NV.softmax(-1).topk(count)
        return [*zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def begin(self, tokens: Sequence[int], chunk: int) -> tuple[Sequence_, DraftRequest]:
        """Prefill all tokens but the last, the draft's root, in the target."""
        own = self.runner.sequence()
        for at in range(0, len(tokens) - 1, chunk):
            self.runner.step([(own, tokens[at : min(at + chunk, len(tokens) - 1)])])
        held = Held(own.table_N, CommittedState(own.state) if self.runner.layout.states else None)
        return own, DraftRequest(own.owner, len(tokens), tokens, own.table_N, None, memory=held)

    @torch.inference_mode()
    def verify(
        self, own: Sequence_, want: DraftRequest, drafted: Sequence[int], accepted: int
    ) -> DraftRequest:
        """Verify a chain in the target and accept `accepted` nodes, including the root."""
        held, tokens = want.memory, [want.tokens[-1], *drafted]
        assert isinstance(held, Held)
        before = held.committed or CommittedState(0)
        row = Row(TokenTree.chain(tokens), own.length, own.table_N, before.state, before.path)
        slots = self.backing.begin(want.key, len(tokens))
        assert slots is not None
        window = build_window([self.backing.with_slots(row, slots)], self.runner.conv_width, CPU)
        self.runner.network.forward(window, self.runner.arena)
        if held.committed:
            held.committed = self.backing.promote(want.key, before, slots, range(accepted))
        own.length += accepted
        return replace(want, tokens=[*want.tokens, *drafted[: accepted - 1], 4])

    def behind(self, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Prefill the tokens in the target, then run the root and a path through the copy as plain text."""
        own, _ = self.begin(tokens, chunk=5)
        assert self.runner.copy is not None
        return self.runner.step([(own, [tokens[-1], *path])], by=self.runner.copy)[0][-1]


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_is_guessed_behind_those_before_it(
    family_folder: Callable[..., Path], family: str, backing: str
) -> None:
    """For sequences of different lengths and depths at once, one with records that are not folded yet."""
    bench = Bench(family_folder(family), backing)
    one, first = bench.begin(TEXT, chunk=4)
    first = bench.verify(one, first, [8, 9, 30], accepted=3)
    _, second = bench.begin(TEXT[5:12], chunk=3)
    shape, shorter = CHAIN, replace(CHAIN, num_steps=2)
    wants = [replace(first, shape=shape), replace(second, shape=shorter), second]
    proposals = bench.drafter.propose(wants)
    assert [proposal.num_drafted for proposal in proposals] == [shape.num_steps, 2, 0]
    assert [max(proposal.tree.depths) for proposal in proposals] == [shape.num_steps, 2, 0]
    assert len(bench.ranked) == shape.num_steps + 2
    for (key, path), logits_V in bench.ranked.items():
        want = first if key == first.key else second
        assert (logits_V - bench.behind(want.tokens, path)).abs().max() < EXACT


def traces(bench: Bench) -> set[str]:
    """Draft twice; return what differs from a sequence without drafts."""
    arena, wrong = bench.runner.arena, set()
    states, logits = [], []
    for drafts in (True, False):
        own, want = bench.begin(TEXT, chunk=4)
        for drafted in ([8, 9, 30], [8, 11]):
            want = bench.verify(own, want, drafted, accepted=2)
            held = want.memory
            assert held is not None
            if drafts:
                before, known = arena.held, held.committed
                bench.drafter.propose([replace(want, shape=CHAIN)])
                if (arena.held, held.committed) != (before, known):
                    wrong.add("slots")
        if held.committed:
            path, length_B = record_ids([held.committed.path], CPU)
            own.state = held.committed.state
            bench.runner.network.materialize(arena, torch.tensor([own.state]), path, length_B)
            states.append(arena.state_bytes_X(own.state).view(torch.float64).clone())
        logits.append(bench.runner.step([(own, [1, 2, 3])])[0])
    if states and not torch.equal(*states):
        wrong.add("state")
    return wrong if torch.equal(*logits) else {*wrong, "logits"}


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_is_committed_changes(
    family_folder: Callable[..., Path], family: str, backing: str
) -> None:
    assert traces(Bench(family_folder(family), backing)) == set()


def in_place(patch: pytest.MonkeyPatch) -> None:
    """Draft in the sequence's own state."""
    inner = ChainContinuation.row

    def wrong(draft: ChainContinuation) -> Row:
        committed = draft.memory.committed
        return replace(inner(draft), state=committed.state if committed else 0)

    patch.setattr(ChainContinuation, "row", wrong)


def a_token_early(patch: pytest.MonkeyPatch) -> None:
    """Overwrite the last committed KV."""
    inner = ChainContinuation.row

    def wrong(draft: ChainContinuation) -> Row:
        right = inner(draft)
        return replace(right, length=right.length - 1)

    patch.setattr(ChainContinuation, "row", wrong)


@pytest.mark.usefixtures("shared_grammar_process")
@pytest.mark.parametrize("mutant", [in_place, a_token_early])
def test_a_trace_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    bench = Bench(folder, "record")
    mutant(monkeypatch)
    assert traces(bench) & {"state", "logits"}
    cases = plain_cases(folder)
    with drafting_engine(folder, "self-int4", cases, **SHAPES["chain"]) as (engine, _):
        assert differences(cases, generate(engine, cases)) != []


def test_without_a_state_to_spare_nothing_is_drafted(folder: Path) -> None:
    bench = Bench(folder, "record")
    _, want = bench.begin(TEXT, chunk=4)
    asked = [replace(want, shape=CHAIN)]
    arena = bench.runner.arena
    while arena.take_snapshots("others", 1):
        pass
    assert [own.num_drafted for own in bench.drafter.propose(asked)] == [0]
    arena.release_owner("others")
    assert [own.num_drafted for own in bench.drafter.propose(asked)] == [4]


def test_blocks_may_move_while_states_are_borrowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(folder, "record")
    own, want = bench.begin(TEXT, chunk=4)
    held, inner = Held(want.table_N[:2], CommittedState(own.state)), Arena.take_snapshots

    def take(arena: Arena, owner: Owner, count: int) -> list[int] | None:
        before, *kept = held.table_N.tolist()
        (new,) = arena.take_blocks(owner, 1) or (0,)
        arena.block_bytes_X(new).copy_(arena.block_bytes_X(before))
        arena.block_bytes_X(before).fill_(0xFF)
        held.table_N = torch.tensor([new, *kept])
        return inner(arena, owner, count)

    monkeypatch.setattr(Arena, "take_snapshots", take)
    bench.drafter.propose([replace(want, memory=held, shape=CHAIN)])
    monkeypatch.undo()
    assert len(bench.ranked) == CHAIN.num_steps
    for (_, path), logits_V in bench.ranked.items():
        assert (logits_V - bench.behind(TEXT, path)).abs().max() < EXACT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shipped_model_takes_most_of_what_its_copy_guesses(temperature: float) -> None:
    """Also at temperature 1: the copy ranks with the target's sampling noise."""
    prompts = ["def read_lines(path):\n", "import os\n", "class Stack:\n    def push(self, item):\n"]
    params = [
        SamplingParams(max_tokens=100, temperature=temperature, seed=i, ignore_eos=True) for i in range(3)
    ]
    with SpecEngine("tiny", draft="self-int4", num_steps=3, adaptive=False, dtype="float32") as engine:
        engine.generate(prompts, params)
        counts = engine.model.loop.counts
    print(temperature, [round(rate, 3) for rate in counts.per_depth])
    assert counts.per_depth[0] > 0.8 and counts.drafted > 150
