"""Replay a network's pass from a tape if windows of the same shape recur."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from specdec.kernels.group import Group, RecordIds
from specdec.kernels.native.call import listening, room
from specdec.kernels.native.tape import COME, REFUSED, Tape, Tapes
from specdec.kernels.table import Kernels
from specdec.models.mixers.base import ArenaViews
from specdec.state_slots.window import Window

Pass = Callable[..., tuple[Tensor, ...]]
"""A pass: from a window, the memory and per-token tensors to output tensors."""

WIDEST = 32
"""Widest recorded pass in tokens: beyond it arithmetic outweighs call overhead."""
BLOCKS = 16
"""Minimum width of a block table."""


class Replays:
    """Replays recorded passes for windows of the same shape; runs all others directly."""

    def __init__(self, run: Pass, kernels: Kernels, *, alone: bool = True) -> None:
        """Record passes of C kernels that run `alone`, without sums over other processes."""
        self.run, self.serves = run, alone and kernels.name == "native"
        self._by_memory: WeakKeyDictionary[ArenaViews, Tapes[Recorded]] = WeakKeyDictionary()
        """Tapes belong to one arena and are dropped with it."""

    def __call__(
        self, window: Window, memory: ArenaViews, *inputs: Tensor, **constants: Any
    ) -> tuple[Tensor, ...]:
        """Return new tensors; `constants` are part of the key. Within a recording the pass runs directly."""
        group = window.groups[0]
        is_narrow = len(window.groups) == 1 and len(window.token_T) <= WIDEST
        if not self.serves or not is_narrow or listening.recorder:
            return self.run(window, memory, *inputs, **constants)
        tapes = self._by_memory.setdefault(memory, Tapes())
        window = _with_path(window)
        key = _tape_key(window.groups[0]), tuple(constants.items())
        entry = tapes.of(key)
        if isinstance(entry, Recorded):
            return entry.play(window, inputs)
        memory.first_passes += entry is not REFUSED
        if entry is REFUSED or (entry is None and not _is_repeated(group)):
            tapes.note(key, entry or COME)
            return self.run(window, memory, *inputs, **constants)
        recorded = Recorded(window, inputs)
        result = recorded.record(self.run, memory, constants)
        tapes.keep(key, recorded)
        return result


class Recorded:
    """One key's tape with its window and inputs, sized for all windows of that key."""

    def __init__(self, window: Window, inputs: Sequence[Tensor]) -> None:
        self.tape = Tape()
        self.window = _padded_group(window)
        self.inputs = tuple(x.clone() for x in inputs)
        self.outputs: tuple[Tensor, ...] = ()

    def record(self, run: Pass, memory: ArenaViews, constants: dict[str, Any]) -> tuple[Tensor, ...]:
        """Record the pass on this memory."""
        with self.tape:
            self.outputs = run(self.window, memory, *self.inputs, **constants)
        return tuple(out.clone() for out in self.outputs)

    def play(self, window: Window, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy a window into the recorded memory and replay the pass."""
        for to, source in zip(_tensors(self.window), _tensors(window), strict=True):
            (to if to.shape == source.shape else to[tuple(map(slice, source.shape))]).copy_(source)
        for to, source in zip(self.inputs, inputs, strict=True):
            to.copy_(source)
        self.tape.play()
        return tuple([out.clone() for out in self.outputs])


def _is_repeated(group: Group) -> bool:
    """Return whether a window is for decoding or verification; prefill is recorded on its second use."""
    return group.width == 1 or group.record is not None or group.snapshot_BM is not None


def _with_path(window: Window) -> Window:
    """Add an empty path to a draft window without one, so that both cases share a key."""
    group = window.groups[0]
    if group.record is None or group.path is not None:
        return window
    zeros = group.state_B.new_zeros(group.rows, 1)
    path = RecordIds(zeros, zeros)
    with_path = replace(group, path=path, path_length_B=group.state_B.new_zeros(group.rows))
    return replace(window, groups=(with_path,))


def _tape_key(group: Group) -> tuple[int, ...]:
    """Return the key: windows with equal keys make the same calls on the same memory."""
    path = 0 if group.path is None else room(group.path.slab_BN.shape[1], 8)
    taps = 0 if group.tap_BMC is None else group.tap_BMC.shape[2]
    has = group.record is not None, group.snapshot_BM is not None, group.ancestors_BMM is not None, taps
    return group.rows, group.width, path, room(group.table_BN.shape[1], BLOCKS), *has


def _padded_group(window: Window) -> Window:
    """Copy a window into new memory with capacity for every window of its key.

    The copy is equivalent: if the tape is refused, the pass still computes the same result.
    """
    group = window.groups[0]
    path = group.path
    if path is not None:
        width = room(path.slab_BN.shape[1], 8)
        path = RecordIds(*(_padded_ids(ids_BP, width) for ids_BP in path))
    padded = replace(
        group,
        state_B=group.state_B.clone(),
        path=path,
        path_length_B=None if group.path_length_B is None else group.path_length_B.clone(),
        record=None if group.record is None else RecordIds(*(ids_BM.clone() for ids_BM in group.record)),
        snapshot_BM=None if group.snapshot_BM is None else group.snapshot_BM.clone(),
        ancestors_BMM=None if group.ancestors_BMM is None else group.ancestors_BMM.clone(),
        tap_BMC=None if group.tap_BMC is None else group.tap_BMC.clone(),
        table_BN=_padded_ids(group.table_BN, room(group.table_BN.shape[1], BLOCKS)),
        length_B=group.length_B.clone(),
    )
    return replace(
        window, token_T=window.token_T.clone(), position_T=window.position_T.clone(), groups=(padded,)
    )


def _padded_ids(ids_BN: Tensor, width: int) -> Tensor:
    padded = ids_BN.new_zeros(len(ids_BN), width)
    padded[:, : ids_BN.shape[1]] = ids_BN
    return padded


def _tensors(window: Window) -> list[Tensor]:
    """Return the tensors that differ between windows of a key."""
    group = window.groups[0]
    parts = (
        *(window.token_T, window.position_T, group.state_B, group.table_BN, group.length_B),
        *(*(group.path or ()), group.path_length_B, *(group.record or ())),
        *(group.snapshot_BM, group.ancestors_BMM, group.tap_BMC),
    )
    return [part for part in parts if part is not None]
