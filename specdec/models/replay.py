"""Run a network's pass by playing a tape of it, where windows come again in the same form."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from specdec.kernels.group import Group, RecordIds
from specdec.kernels.native.call import listening, room
from specdec.kernels.native.tape import COME, REFUSED, Tape, Tapes
from specdec.kernels.table import Kernels
from specdec.models.mixers.base import Memory
from specdec.state_slots.window import Window

Pass = Callable[..., tuple[Tensor, ...]]
"""Given a window, the memory and tensors by token, what it makes of them."""

WIDEST = 32
"""Tokens of a pass that is recorded: beyond it arithmetic outweighs calls."""
BLOCKS = 16
"""The smallest size of a table."""


class Replays:
    """Play what was recorded of windows of the same form; all others run as they are."""

    def __init__(self, run: Pass, kernels: Kernels) -> None:
        self.run, self.serves = run, kernels.name == "native"
        self._by_memory: WeakKeyDictionary[Memory, Tapes[Recorded]] = WeakKeyDictionary()
        """A tape is of one arena, and goes with it."""

    def __call__(
        self, window: Window, memory: Memory, *inputs: Tensor, **constants: Any
    ) -> tuple[Tensor, ...]:
        """Return fresh tensors; `constants` are part of the form. Inside of a recorded pass it just runs."""
        group = window.groups[0]
        narrow = len(window.groups) == 1 and len(window.token_T) <= WIDEST
        if not self.serves or not narrow or listening.recorder:
            return self.run(window, memory, *inputs, **constants)
        tapes = self._by_memory.setdefault(memory, Tapes())
        window = _with_path(window)
        form = _form(window.groups[0]), tuple(constants.items())
        known = tapes.of(form)
        if isinstance(known, Recorded):
            return known.play(window, inputs)
        memory.first_passes += known is not REFUSED
        if known is REFUSED or (known is None and not _comes_again(group)):
            tapes.note(form, known or COME)
            return self.run(window, memory, *inputs, **constants)
        recorded = Recorded(window, inputs)
        result = recorded.record(self.run, memory, constants)
        tapes.keep(form, recorded)
        return result


class Recorded:
    """One form's tape, and the memory that it reads: a window and inputs, with room for all of the form."""

    def __init__(self, window: Window, inputs: Sequence[Tensor]) -> None:
        self.tape = Tape()
        self.window = _roomy(window)
        self.inputs = tuple(x.clone() for x in inputs)
        self.outputs: tuple[Tensor, ...] = ()

    def record(self, run: Pass, memory: Memory, constants: dict[str, Any]) -> tuple[Tensor, ...]:
        """Run the pass on this memory, once and for all."""
        with self.tape:
            self.outputs = run(self.window, memory, *self.inputs, **constants)
        return tuple(out.clone() for out in self.outputs)

    def play(self, window: Window, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Put a window of this form in place and run the pass again."""
        for to, given in zip(_tensors(self.window), _tensors(window), strict=True):
            (to if to.shape == given.shape else to[tuple(map(slice, given.shape))]).copy_(given)
        for to, given in zip(self.inputs, inputs, strict=True):
            to.copy_(given)
        self.tape.play()
        return tuple([out.clone() for out in self.outputs])


def _comes_again(group: Group) -> bool:
    """Return whether a form is needed often because it decodes; others, parts of prompts, must come twice."""
    return group.width == 1 or group.record is not None or group.snapshot_BM is not None


def _with_path(window: Window) -> Window:
    """Give a draft's window an empty path if it has none: whether the last one was accepted is no form."""
    group = window.groups[0]
    if group.record is None or group.path is not None:
        return window
    nowhere = group.state_B.new_zeros(group.rows, 1)
    path = RecordIds(nowhere, nowhere)
    empty = replace(group, path=path, path_length_B=group.state_B.new_zeros(group.rows))
    return replace(window, groups=(empty,))


def _form(group: Group) -> tuple[int, ...]:
    """Return what must be equal for two windows to make the same calls on the same memory."""
    path = 0 if group.path is None else room(group.path.slab_BN.shape[1], 8)
    taps = 0 if group.tap_BMC is None else group.tap_BMC.shape[2]
    has = group.record is not None, group.snapshot_BM is not None, group.ancestors_BMM is not None, taps
    return group.rows, group.width, path, room(group.table_BN.shape[1], BLOCKS), *has


def _roomy(window: Window) -> Window:
    """Copy a window into memory of its own with room for every window of its form.

    What it says stays true: where something refuses the tape, it computes what it would have computed.
    """
    group = window.groups[0]
    path = group.path
    if path is not None:
        most = room(path.slab_BN.shape[1], 8)
        path = RecordIds(*(_widened(ids_BP, most) for ids_BP in path))
    roomy = replace(
        group,
        state_B=group.state_B.clone(),
        path=path,
        path_length_B=None if group.path_length_B is None else group.path_length_B.clone(),
        record=None if group.record is None else RecordIds(*(ids_BM.clone() for ids_BM in group.record)),
        snapshot_BM=None if group.snapshot_BM is None else group.snapshot_BM.clone(),
        ancestors_BMM=None if group.ancestors_BMM is None else group.ancestors_BMM.clone(),
        tap_BMC=None if group.tap_BMC is None else group.tap_BMC.clone(),
        table_BN=_widened(group.table_BN, room(group.table_BN.shape[1], BLOCKS)),
        length_B=group.length_B.clone(),
    )
    return replace(
        window, token_T=window.token_T.clone(), position_T=window.position_T.clone(), groups=(roomy,)
    )


def _widened(ids_BN: Tensor, most: int) -> Tensor:
    wide = ids_BN.new_zeros(len(ids_BN), most)
    wide[:, : ids_BN.shape[1]] = ids_BN
    return wide


def _tensors(window: Window) -> list[Tensor]:
    """List what changes from window to window of a form."""
    group = window.groups[0]
    parts = (
        *(window.token_T, window.position_T, group.state_B, group.table_BN, group.length_B),
        *(*(group.path or ()), group.path_length_B, *(group.record or ())),
        *(group.snapshot_BM, group.ancestors_BMM, group.tap_BMC),
    )
    return [part for part in parts if part is not None]
