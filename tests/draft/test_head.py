"""A head prefills exactly the tokens it has not seen, and each tree node equals its path as a chain."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdec.config.tenant import SOLE
from specdec.draft.drafter import DraftRequest
from specdec.draft.head import HeadDrafter
from specdec.draft.levels import DraftPosition
from specdec.draft.proposal import DraftShape, Proposal
from specdec.models.network import MTPHead
from specdec.state_slots.arena import Arena
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, Window, build_window
from tests.models.agreeing import VOCAB
from tests.models.runner import CPU, Runner, Sequence_

FAMILIES = ("qwen3_5", "nemotron_h")
TEXT = [5, 17, 40, 3, 3, 28, 61, 9, 12, 33, 7, 50, 2, 2, 19, 44, 8, 30, 21, 6, 11, 11, 57, 4]
CHAIN, TREE = DraftShape(4, 1, 5), DraftShape(3, 3, 12)
CHUNK = 512
EXACT = 1e-6
"""For float64 logits: the router of Nemotron's experts uses float32 whatever the model's dtype."""


@dataclass
class Watched:
    """A real head that records its inputs: positions, tokens and hidden states."""

    inner: MTPHead
    read: list[tuple[list[int], list[int], Tensor]] = field(default_factory=list)

    def forward(self, window: Window, hidden_TD: Tensor, memory: Arena) -> Tensor:
        self.read.append((window.position_T.tolist(), window.token_T.tolist(), hidden_TD))
        return self.inner.forward(window, hidden_TD, memory)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self.inner.logits(hidden_TD)


class Ranked(NamedTuple):
    """A sequence's draft path, after which guesses were ranked."""

    key: Hashable
    path: tuple[int, ...]


class Bench:
    """A small model with its head, and a drafter whose guesses are the likeliest tokens."""

    def __init__(self, folder: Path) -> None:
        self.runner = Runner(folder, torch.float64, mtp=True, slabs=80)
        assert self.runner.head is not None
        self.head = Watched(self.runner.head)
        self.logits: dict[Ranked, Tensor] = {}
        self.drafter = HeadDrafter(self.head, self.runner.arena, self._rank, CPU, CHUNK)

    def _rank(self, logits_NV: Tensor, places: Sequence[DraftPosition], count: int) -> list[Any]:
        ranked = (Ranked(place.want.key, place.path) for place in places)
        self.logits |= dict(zip(ranked, logits_NV, strict=True))
        best_NK = logits_NV.softmax(-1).topk(count)
        return list(zip(best_NK.indices.tolist(), best_NK.values.tolist(), strict=True))

    def read(self, key: str, own: Sequence_, tokens: Sequence[int]) -> None:
        """Run tokens of a sequence through the target, and pass their hidden states to the drafter."""
        self.runner.step([(own, tokens)])
        self.drafter.read(key, own.hidden[-1])

    def begin(self, key: str, length: int, start: int = 0) -> Sequence_:
        own = self.runner.sequence()
        self.read(key, own, TEXT[start : start + length])
        return own

    def propose(self, key: str, own: Sequence_, shape: DraftShape | None, start: int = 0) -> Proposal:
        return self.drafter.propose([want(key, own, shape, start)])[0]

    def alone(self, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return the head's logits after a path, computed token by token in fresh memory."""
        own = self.runner.sequence()
        self.runner.step([(own, tokens[:-1])])
        inputs, out_D = torch.cat(own.hidden), torch.empty(0)
        for position, token in enumerate([*tokens[1:], *path]):
            hidden_D = inputs[position] if position < len(inputs) else out_D
            window = build_window([Row(TokenTree.chain([token]), position, own.table_N, 0)], 1, CPU)
            out_D = self.head.inner.forward(window, hidden_D[None], self.runner.arena)[0]
        return self.head.logits(out_D[None])[0]


def want(key: str, own: Sequence_, shape: DraftShape | None, start: int = 0) -> DraftRequest:
    return DraftRequest(key, 1, TEXT[start : start + own.length + 1], own.table_N, shape)


@pytest.fixture(params=FAMILIES)
def bench(family_folder: Callable[..., Path], request: pytest.FixtureRequest) -> Bench:
    with torch.inference_mode():
        return Bench(family_folder(request.param))


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=EXACT, atol=EXACT)


@torch.inference_mode()
def test_it_reads_exactly_what_it_has_not_read(bench: Bench) -> None:
    own = bench.begin("a", 6)
    bench.read("a", own, TEXT[6:8])
    bench.propose("a", own, DraftShape(1, 1, 2))
    (positions, tokens, hidden_TD), *more = bench.head.read
    assert (positions, tokens, more) == (list(range(8)), TEXT[1:9], [])
    assert torch.equal(hidden_TD, torch.cat(own.hidden))
    bench.head.read.clear()
    bench.read("a", own, TEXT[8:10])
    bench.propose("a", own, DraftShape(1, 1, 2))
    (positions, tokens, hidden_TD), *more = bench.head.read
    assert (positions, tokens, more) == ([8, 9], TEXT[9:11], [])
    assert torch.equal(hidden_TD, own.hidden[-1])


@torch.inference_mode()
@pytest.mark.parametrize("shapes", [(CHAIN, TREE, CHAIN), (TREE, CHAIN, TREE)], ids=["chains", "trees"])
def test_every_node_reads_its_own_path(bench: Bench, shapes: Sequence[DraftShape]) -> None:
    """Also after rejected drafts, whose KV must be invisible."""
    own = bench.begin("a", 7)
    for shape, more in zip(shapes, (1, 4, 1), strict=True):
        bench.logits.clear()
        proposal = bench.propose("a", own, shape)
        assert len(proposal.tree) == shape.num_draft_tokens
        assert {len(place.path) for place in bench.logits} == set(range(shape.num_steps))
        for place, logits_V in bench.logits.items():
            assert close(logits_V, bench.alone(TEXT[: own.length + 1], place.path)), place
        bench.read("a", own, TEXT[own.length : own.length + more])


@torch.inference_mode()
def test_a_wrong_path_would_show(bench: Bench) -> None:
    own = bench.begin("a", 7)
    bench.propose("a", own, TREE)
    deep = [place for place in bench.logits if len(place.path) == 2]
    assert len(deep) == TREE.topk
    for place in deep:
        others = (place.path[::-1], place.path[1:], (place.path[0], (place.path[1] + 1) % VOCAB))
        expected = [bench.alone(TEXT[:8], path) for path in others if path != place.path]
        assert not any(close(bench.logits[place], other) for other in expected)


@torch.inference_mode()
def test_proposals_are_what_was_ranked(bench: Bench) -> None:
    own = bench.begin("a", 9)
    chain = bench.propose("a", own, CHAIN)
    path: tuple[int, ...] = ()
    for token, belief in zip(chain.tree.tokens[1:], chain.beliefs[1:], strict=True):
        share_V = bench.logits[Ranked("a", path)].softmax(-1)
        assert token == share_V.argmax() and belief == pytest.approx(float(share_V.max()))
        path = (*path, token)


@torch.inference_mode()
def test_sequences_that_draft_together_draft_as_alone(bench: Bench) -> None:
    """With different lengths, as a tree, a chain or no draft, in any order."""
    asked: list[tuple[str, int, int, DraftShape | None]] = [
        ("a", 5, 0, TREE),
        ("b", 12, 3, CHAIN),
        ("c", 2, 9, None),
        ("d", 5, 7, TREE),
        ("e", 1, 4, DraftShape(2, 2, 4)),
    ]
    alone = []
    for key, length, start, shape in asked:
        own = bench.begin(key, length, start)
        alone.append(bench.propose(key, own, shape, start))
        bench.drafter.end(key, (), None, SOLE)
    for order in (asked, asked[::-1]):
        owns = [bench.begin(key, length, start) for key, length, start, _ in order]
        wants = [want(key, own, shape, at) for own, (key, _, at, shape) in zip(owns, order, strict=True)]
        together = bench.drafter.propose(wants)
        for found, own_asked in zip(together, order, strict=True):
            expected = alone[asked.index(own_asked)]
            assert found.tree == expected.tree
            assert found.scores == pytest.approx(expected.scores, rel=EXACT)
        for key, *_ in order:
            bench.drafter.end(key, (), None, SOLE)


@torch.inference_mode()
@pytest.mark.parametrize(
    "leave", [lambda d: d.on_preempt("a"), lambda d: d.end("a", TEXT[:1], TEXT[1:8], SOLE)]
)
def test_a_sequence_that_lost_its_memory_is_read_from_its_start(
    bench: Bench, leave: Callable[[HeadDrafter], None]
) -> None:
    own = bench.begin("a", 6)
    bench.propose("a", own, CHAIN)
    bench.read("a", own, TEXT[6:9])
    leave(bench.drafter)
    bench.head.read.clear()
    again = bench.begin("a", 4)
    bench.propose("a", again, CHAIN)
    positions, tokens, hidden_TD = bench.head.read[0]
    assert (positions, tokens) == (list(range(4)), TEXT[1:5])
    assert torch.equal(hidden_TD, torch.cat(again.hidden))
    leave(bench.drafter)
    leave(bench.drafter)


@torch.inference_mode()
def test_what_is_too_much_to_keep_is_read_without_a_draft(bench: Bench) -> None:
    own = bench.begin("a", 3)
    bench.drafter.chunk_tokens = 6
    assert not bench.drafter.is_full("a") and not bench.drafter.is_full("nobody")
    bench.read("a", own, TEXT[3:6])
    assert bench.drafter.is_full("a")
    assert bench.propose("a", own, None).num_drafted == 0
    assert not bench.drafter.is_full("a") and not bench.logits
    bench.drafter.chunk_tokens = 64
    # Early and late prefill give the same result.
    bench.read("a", own, TEXT[6:8])
    late = bench.begin("b", 8)
    early_found, late_found = (bench.propose(key, s, TREE) for key, s in (("a", own), ("b", late)))
    assert early_found.tree == late_found.tree
    assert early_found.scores == pytest.approx(late_found.scores, rel=EXACT)
    bench.drafter.on_preempt("b")
    assert not bench.drafter.is_full("b")


@torch.inference_mode()
def test_a_long_text_is_read_in_parts_and_drafted_from_when_all_is_read(bench: Bench) -> None:
    whole = bench.begin("a", 11)
    expected = bench.propose("a", whole, TREE)
    bench.drafter.chunk_tokens = 4
    bench.head.read.clear()
    own, near = bench.begin("b", 11), bench.begin("c", 2)
    wants = [want("b", own, TREE), want("c", near, TREE)]
    first = bench.drafter.propose(wants)
    assert first[0].num_drafted == 0 < first[1].num_drafted
    assert len(bench.head.read[0][0]) <= 4
    parts = [bench.propose("b", own, TREE) for _ in range(3)]
    assert [part.num_drafted for part in parts[:2]] == [0, 0]
    assert parts[2].tree == expected.tree
    assert parts[2].scores == pytest.approx(expected.scores, rel=EXACT)


def test_what_is_kept_keeps_nothing_else_alive(bench: Bench) -> None:
    step_TD = torch.zeros(1000, 8)
    bench.drafter.read("a", step_TD[3:5])
    (kept_MD,) = bench.drafter._unread["a"].hidden
    assert kept_MD.untyped_storage().nbytes() == kept_MD.nbytes


@torch.inference_mode()
def test_a_drafts_keys_and_values_stay_within_what_was_reserved(bench: Bench) -> None:
    """The loop reserves as many positions as a draft verifies, or as the head writes while it drafts."""
    for shape in (TREE, CHAIN, DraftShape(4, 4, 3)):
        bench.head.read.clear()
        own = bench.begin("a", 5)
        bench.propose("a", own, shape)
        reserved = max(shape.num_draft_tokens, shape.topk * shape.num_steps)
        ends = [positions[0] + len(tokens) for positions, tokens, _ in bench.head.read]
        assert max(ends) <= own.length + reserved
        bench.drafter.end("a", (), None, SOLE)


@pytest.mark.parametrize("count", [0, 2, 5])
@torch.inference_mode()
def test_dropping_removes_the_last_hidden_states_only(bench: Bench, count: int) -> None:
    own = bench.begin("a", 6)
    drafter = bench.drafter
    drafter.drop("a", count)
    assert drafter.num_unread("a") == 6 - count
    start, hidden_MD = drafter.take_pending("a")
    assert start == 0 and torch.equal(hidden_MD, own.hidden[-1][: 6 - count])
