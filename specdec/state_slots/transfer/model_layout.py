"""A model's memory layout in plain numbers, and each rank's part of it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Self

import torch

from specdec.config.base import SHORT
from specdec.errors import ConfigError
from specdec.state_slots.layout import KVShape, Layout, StateShape

ORDER = (
    "blocks [head, layer, part, token, dim] by shape; slots [head, key, value] and [channel, input] by layer"
)
"""Byte order of blocks and slots: a build with another one must not read this one's memory."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The layout of a whole model, independent of its engine's number of ranks."""

    order: str
    block_tokens: int
    dtype: str
    kv_dtype: str
    state_dtype: str
    kv: tuple[KVShape, ...]
    states: tuple[StateShape, ...]

    @classmethod
    def of(cls, layout: Layout) -> Self:
        return cls(
            order=ORDER,
            block_tokens=layout.block_tokens,
            dtype=_name(layout.dtype),
            kv_dtype=_name(layout.page_dtype),
            state_dtype=_name(layout.state_dtype),
            kv=layout.kv,
            states=layout.states,
        )

    def layout(self, tp: int) -> Layout:
        """Return the layout of each of `tp` ranks."""
        return Layout(
            kv=tuple(replace(kv, heads=_kv_heads(i, kv, tp)) for i, kv in enumerate(self.kv)),
            states=tuple(_state(i, state, tp) for i, state in enumerate(self.states)),
            dtype=_dtype("dtype", self.dtype),
            state_dtype=_dtype("state_dtype", self.state_dtype),
            block_tokens=self.block_tokens,
            kv_dtype=_dtype("kv_dtype", self.kv_dtype),
        )

    def check_equal(self, peer: "ModelLayout") -> None:
        """Refuse a peer with another memory layout, naming the first value that differs."""
        if self == peer:
            return
        ours, theirs = (dict(_leaves(asdict(cut))) for cut in (self, peer))
        path = next(path for path in ours | theirs if ours.get(path) != theirs.get(path))
        raise ConfigError(
            f"{path} is {SHORT.repr(theirs.get(path))} at the peer and {ours.get(path)!r} here: "
            "start both engines with the same model, drafter and settings",
            field=path.split(".")[0],
        )


def rank_units(units: int, tp: int, rank: int) -> range:
    """Return a rank's units; with fewer units than ranks, neighbours hold the same one."""
    if units >= tp:
        per_rank = units // tp
        return range(rank * per_rank, (rank + 1) * per_rank)
    unit = rank // (tp // units)
    return range(unit, unit + 1)


def _kv_heads(layer: int, kv: KVShape, tp: int) -> int:
    """Return a rank's heads: at least one, which several ranks may then hold."""
    return 1 if tp % kv.heads == 0 else _share(kv.heads, tp, f"KV heads of attention layer {layer}")


def _state(layer: int, state: StateShape, tp: int) -> StateShape:
    """Return a rank's heads (or columns of the only head) and its channels of each projection."""
    if tp == 1:
        return state
    if not state.runs:
        raise ConfigError(
            f"tp is {tp}, but recurrent layer {layer} does not say how its channels are cut: give 1",
            field="tp",
        )
    of = f"of recurrent layer {layer}"
    by_columns = state.heads == 1
    return replace(
        state,
        heads=1 if by_columns else _share(state.heads, tp, f"heads {of}"),
        value_dim=_share(state.value_dim, tp, f"value columns {of}") if by_columns else state.value_dim,
        channels=state.channels // tp,
        runs=tuple((_share(units, tp, f"units of channels {of}"), width) for units, width in state.runs),
    )


def _share(units: int, tp: int, what: str) -> int:
    if units % tp:
        raise ConfigError(f"tp is {tp}, which does not divide the {units} {what}: give another", field="tp")
    return units // tp


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield all plain values within dictionaries and tuples with their paths."""
    if not isinstance(value, dict | tuple):
        yield path, value
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{path}.{name}" if path else str(name))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(field: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{field} is {name!r}, which is not a dtype", field=field)
    return dtype
