"""Mutants of a device step that the text comparison must detect: one patch each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.core.device import pack, step
from specdec.core.device.device_batch import DeviceBatch
from specdec.core.device.rows import BatchRows
from specdec.core.device.step import DeviceStep
from tests.lossless.cases import SHAPES, Case, differences, drafting_engine, generate, plain_cases

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]
FEATURES = ("greedy", "temperature", "filters")


@pytest.fixture(scope="module")
def known(folder: Path) -> tuple[Path, list[Case]]:
    return folder, [case for case in plain_cases(folder) if case.feature in FEATURES]


def keeps_the_texts(known: tuple[Path, list[Case]], backing: str) -> bool:
    folder, cases = known
    fields = {**SHAPES["tree"], "slots": backing, "graphs": True}
    with drafting_engine(folder, "mtp", cases, **fields) as (engine, _):
        found = generate(engine, cases)
        assert engine.model.loop.counts.accepted > 0
    return not differences(cases, found, within=1e-6)


def a_path_of_the_first_nodes(patch: Patch) -> None:
    """Keep the first nodes' records, whichever were accepted."""
    inner = DeviceStep._commit

    def wrong(self: DeviceStep, rows: BatchRows, slots: Any, node_BM: Tensor, count_B: Tensor) -> None:
        inner(self, rows, slots, torch.arange(node_BM.shape[1]).expand_as(node_BM), count_B)

    patch.setattr(DeviceStep, "_commit", wrong)


def a_path_one_short(patch: Patch) -> None:
    """Leave the last accepted record unfolded."""
    inner = DeviceStep._commit

    def wrong(self: DeviceStep, rows: BatchRows, *rest: Any) -> None:
        inner(self, rows, *rest)
        rows.path_length_B.sub_(1).clamp_(min=0)

    patch.setattr(DeviceStep, "_commit", wrong)


def keys_stay_in_the_tree(patch: Patch) -> None:
    """Leave the accepted path's KV at the tree's positions."""
    patch.setattr("specdec.models.network.Network.move", lambda *_: None)


def noise_of_the_root(patch: Patch) -> None:
    """Use the root's position for every node's noise."""
    inner = DeviceStep._choose

    def wrong(self: DeviceStep, hidden_TD: Tensor, rows: BatchRows, key: Any, position_T: Tensor) -> Tensor:
        position_T = position_T.view(-1, key.nodes)[:, :1].expand(-1, key.nodes).reshape(-1)
        return inner(self, hidden_TD, rows, key, position_T)

    patch.setattr(DeviceStep, "_choose", wrong)


def seeds_of_the_neighbour(patch: Patch) -> None:
    """Give each node the seed of another row."""
    patch.setattr(step, "repeat_rows", lambda x_B, count: pack.repeat_rows(x_B.roll(1), count))


def a_swapped_parent(patch: Patch) -> None:
    """Attach later nodes to the root when ancestors are computed."""
    inner = pack.Packer.__call__

    def wrong(
        self: pack.Packer, rows: BatchRows, token_BM: Tensor, parent_BM: Any, *rest: Any, **last: Any
    ) -> Any:
        if parent_BM is not None and len(rest) > 1:
            parent_BM = parent_BM.clone()
            parent_BM[:, 2:] = 0
        return inner(self, rows, token_BM, parent_BM, *rest, **last)

    patch.setattr(pack.Packer, "__call__", wrong)


def the_state_before(patch: Patch) -> None:
    """Continue with the state of the root."""
    inner = DeviceStep._commit

    def wrong(self: DeviceStep, rows: BatchRows, slots: Any, node_BM: Tensor, count_B: Tensor) -> None:
        inner(self, rows, slots, torch.zeros_like(node_BM), count_B)

    patch.setattr(DeviceStep, "_commit", wrong)


def the_host_loses_track(patch: Patch) -> None:
    """Return the other set's records."""
    inner = DeviceBatch._unload

    def wrong(self: DeviceBatch, row: int, held: Any) -> None:
        committed = held.request.committed
        if committed and committed.path:
            own = held.sets[0]
            held.request.committed = replace(committed, path=tuple(own[: len(committed.path)]))
        inner(self, row, held)

    patch.setattr(DeviceBatch, "_unload", wrong)


MUTANTS: dict[str, tuple[str, Mutant]] = {
    mutant.__name__: (backing, mutant)
    for backing, mutants in {
        "record": (
            a_path_of_the_first_nodes,
            a_path_one_short,
            keys_stay_in_the_tree,
            noise_of_the_root,
            seeds_of_the_neighbour,
            a_swapped_parent,
            the_host_loses_track,
        ),
        "snapshot": (the_state_before,),
    }.items()
    for mutant in mutants
}


@pytest.mark.parametrize("backing", ["record", "snapshot"])
def test_the_step_as_it_is_keeps_the_texts(known: tuple[Path, list[Case]], backing: str) -> None:
    assert keeps_the_texts(known, backing)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_changes_a_text(known: tuple[Path, list[Case]], name: str, monkeypatch: Patch) -> None:
    backing, mutant = MUTANTS[name]
    with monkeypatch.context() as patch:
        mutant(patch)
        assert not keeps_the_texts(known, backing)
