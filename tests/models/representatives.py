"""Small models that together cover every mixer, frame and kind of memory."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

import torch

from specdec.models import families
from specdec.models.network import memory_layout
from specdec.setup.capabilities import AXES
from tests.models.agreeing import CONFIGS

EVERY_CELL = ("qwen3_5", "nemotron_h")
"""Families tested with every cell of the capability table; the others with every pair of values."""


def parts(family: str) -> set[Any]:
    """Collect a family's mixers, their options and frames, and whether it has KV and states."""
    network = families.network(CONFIGS[family]().to_dict())
    layout = memory_layout(network, torch.float64)
    frames = {frame for layer in network.layers for frame in (layer.frame, layer.ffn_frame)}
    options = {
        (type(mixer), option.name, getattr(mixer, option.name) == option.default)
        for mixer in network.mixers()
        for option in fields(mixer)
        if option.default is not MISSING
    }
    kinds = {type(mixer) for mixer in network.mixers()}
    return kinds | options | frames | {(bool(layout.kv), bool(layout.states))}


def one_of_each(names: Iterable[str]) -> tuple[str, ...]:
    """Select each family with a part that no earlier one has."""
    kept, seen = [], set[Any]()
    for family in names:
        if not parts(family) <= seen:
            kept.append(family)
            seen |= parts(family)
    return tuple(kept)


REPRESENTATIVES = one_of_each((*EVERY_CELL, *AXES["family"]))
