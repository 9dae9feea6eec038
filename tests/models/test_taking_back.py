"""A whole network over windows of drafts: accepted tokens continue as if nothing else had been verified."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from specdec.kernels.group import RecordIds
from specdec.kernels.native.compiled import compiled
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from tests.models.random_checkpoints import draw, save
from tests.models.runner import CPU, Runner, Sequence_
from tests.tolerances import FLOAT64_LOGITS, LOGITS_RELATIVE

FAMILIES = ("qwen3_5", "qwen3_next", "nemotron_h", "qwen3")
CASES = [("cpu", torch.float64), *([("native", torch.float32)] if compiled() else [])]
LENGTH, WIDTH = 60, 7
Slots = list[int] | list[tuple[int, int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, int]]:
    made: dict[str, tuple[Path, int]] = {}

    def make(family: str) -> tuple[Path, int]:
        if family not in made:
            sample, path = draw(family, 0), tmp_path_factory.mktemp("model")
            save(sample, path)
            made[family] = path, sample.config.vocab_size
        return made[family]

    return make


class Drafting:
    """Run a sequence in trees of which one path holds its tokens; commit that path."""

    def __init__(self, runner: Runner, own: Sequence_, backing: str, *, move: bool = True) -> None:
        self.runner, self.own, self.backing, self.move = runner, own, backing, move
        self.path: list[tuple[int, int]] = []
        self.free: Slots = []
        if runner.layout.states:
            arena = runner.arena
            taken = (
                arena.take_records(99, 3 * WIDTH) if backing == "record" else arena.take_snapshots(99, WIDTH)
            )
            assert taken is not None
            self.free = taken

    def _row(self, tree: TokenTree, slots: Slots) -> Row:
        own, backing = self.own, {"record": "records", "snapshot": "snapshots"}[self.backing]
        given = {backing: slots} if self.runner.layout.states else {"records": [(0, 0)] * len(tree)}
        return Row(tree, own.length, own.table_N, own.state, self.path, **given)

    @torch.inference_mode()
    def verify(self, tree: TokenTree, nodes: Sequence[int]) -> Tensor:
        """Return the logits of the accepted nodes, a path from the root."""
        runner, own = self.runner, self.own
        slots = self.free[: len(tree)]
        window = build_window([self._row(tree, slots)], runner.conv_width, CPU)
        logits_TV = runner.network.logits(runner.network.forward(window, runner.arena))
        if self.move:
            source = torch.tensor([[own.length + node for node in nodes]])
            target = own.length + torch.arange(len(nodes))[None]
            runner.network.move(runner.arena, own.table_N[None], source, target)
        own.length += len(nodes)
        if slots and self.backing == "snapshot":
            last = slots[nodes[-1]]
            self.free = [slot for slot in self.free if slot != last] + [own.state]
            own.state = last
        elif slots:
            kept = [slots[node] for node in nodes]
            self.free = [slot for slot in self.free if slot not in kept] + self.path
            self.path = kept
        return logits_TV[list(nodes)]

    def materialize(self) -> None:
        path = RecordIds(*(torch.tensor([[at[n] for at in self.path]]) for n in range(2)))
        state, length = torch.tensor([self.own.state]), torch.tensor([len(self.path)])
        self.runner.network.materialize(self.runner.arena, state, path, length)
        self.free, self.path = self.free + self.path, []


def read_in_trees(drafting: Drafting, tokens: Sequence[int], vocab: int, *, fold_every: int) -> Tensor:
    rng, out = Random(3), []
    out.append(drafting.runner.step([(drafting.own, tokens[:20])])[0])
    step = 0
    while (done := drafting.own.length) < len(tokens):
        parents = [-1, *(rng.randrange(max(0, i - 3), i) for i in range(1, rng.randint(1, WIDTH)))]
        said = [rng.randrange(vocab) for _ in parents]
        nodes = TokenTree(tuple(said), tuple(parents)).path(rng.randrange(len(parents)))
        nodes = nodes[: len(tokens) - done]
        for node, token in zip(nodes, tokens[done:], strict=False):
            said[node] = token
        out.append(drafting.verify(TokenTree(tuple(said), tuple(parents)), nodes))
        step += 1
        if step % fold_every == 0 and drafting.path:
            drafting.materialize()
    return torch.cat(out)


def agrees(found: Tensor, expected: Tensor) -> bool:
    if found.dtype == torch.float64:
        return torch.allclose(found, expected, rtol=FLOAT64_LOGITS, atol=FLOAT64_LOGITS)
    return float((found - expected).norm() / expected.norm()) < LOGITS_RELATIVE


@pytest.mark.parametrize("backing", ["record", "snapshot"])
@pytest.mark.parametrize(("kernels", "dtype"), CASES, ids=[name for name, _ in CASES])
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_in_trees_equals_reading_in_order(
    folder: Callable[[str], tuple[Path, int]], family: str, kernels: str, dtype: torch.dtype, backing: str
) -> None:
    path, vocab = folder(family)
    tokens = Random(1).choices(range(vocab), k=LENGTH)
    runner = Runner(path, dtype, kernels=kernels)
    expected_TV = runner.read(tokens, LENGTH)
    drafting = Drafting(runner, runner.sequence(), backing)
    assert agrees(read_in_trees(drafting, tokens, vocab, fold_every=3), expected_TV)


@pytest.mark.parametrize("fault", ["no move", "stale path", "no fold"])
def test_a_mistake_in_committing_is_noticed(
    folder: Callable[[str], tuple[Path, int]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, vocab = folder("qwen3_5")
    tokens = Random(1).choices(range(vocab), k=LENGTH)
    runner = Runner(path, torch.float64)
    expected_TV = runner.read(tokens, LENGTH)
    drafting = Drafting(runner, runner.sequence(), "record", move=fault != "no move")
    if fault == "no fold":
        monkeypatch.setattr(runner.network, "materialize", lambda *_: None)
    if fault == "stale path":
        row = drafting._row
        monkeypatch.setattr(drafting, "_row", lambda tree, slots: _shortened(row(tree, slots)))
    assert not agrees(read_in_trees(drafting, tokens, vocab, fold_every=3), expected_TV)


def _shortened(row: Row) -> Row:
    return Row(row.tree, row.length, row.table_N, row.state, row.path[:-1], row.records)
