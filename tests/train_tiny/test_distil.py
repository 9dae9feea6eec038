"""Heads learn from text and from the trunk's samples, half of a batch's rows each."""

from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.errors import ConfigError
from tools.train_tiny import answers, distil, run
from tools.train_tiny.heads import MTP, Eagle3
from tools.train_tiny.recipe import recipe
from tools.train_tiny.stage import Phase, Plan, digest
from tools.train_tiny.trunk import Shape, Trunk

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
PLAN = Plan((Phase(2, 4, 32),), matrix_rate=0.0, embedding_rate=1e-3, other_rate=1e-3)
DEPTH = 2


@pytest.fixture
def trunk() -> Trunk:
    torch.manual_seed(0)
    return Trunk(Shape(**SIZES), chunk=16).eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(Trunk, "compile_layers", lambda _: None)


def test_half_of_the_rows_are_the_ends_of_answers(trunk: Trunk, monkeypatch: pytest.MonkeyPatch) -> None:
    text, said = np.zeros(500, dtype=np.uint16), np.tile(np.arange(20, 60, dtype=np.uint16), (3, 1))
    read: list[torch.Tensor] = []
    inner = Trunk.forward
    monkeypatch.setattr(Trunk, "forward", lambda own, ids, *taps: read.append(ids) or inner(own, ids, *taps))
    step = distil.head_step(MTP(trunk.shape), trunk, text, said, PLAN, DEPTH)
    step(0, PLAN.phase(0))
    (ids,) = read
    assert (ids[:2] == 0).all() and ids[2:].tolist() == [list(range(28, 60))] * 2


def test_rows_of_answers_are_drawn_by_seed_and_step() -> None:
    said = np.arange(600, dtype=np.uint16).reshape(300, 2)
    first = answers.some(said, 1, 8, seed=0)
    assert first.tolist() == answers.some(said, 1, 8, seed=0).tolist()
    assert first.tolist() != answers.some(said, 2, 8, seed=0).tolist()
    assert first.tolist() != answers.some(said, 1, 8, seed=1).tolist()


def test_a_head_that_was_fed_other_answers_is_not_taken_up(trunk: Trunk, tmp_path: Path) -> None:
    text, said = np.zeros(500, dtype=np.uint16), np.ones((3, 32), dtype=np.uint16)
    run.teach("mtp", MTP(trunk.shape), PLAN, DEPTH, trunk, text, said, tmp_path)
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="--work"):
        run.teach("mtp", MTP(trunk.shape), PLAN, DEPTH, trunk, text, said + 1, tmp_path)


def test_an_eagle_head_begins_alike_with_any_number_of_threads() -> None:
    """Otherwise resuming with another thread count would report a checkpoint of other weights."""
    torch.manual_seed(0)
    trunk, before = Trunk(recipe("tiny").sizes()).eval(), torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            head = Eagle3(trunk.shape, torch.arange(64))
            head.begin(trunk)
            found.add(digest(head))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
