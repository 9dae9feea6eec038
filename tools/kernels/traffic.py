"""The bytes that each operation must move, if every input and output is touched once.

T tokens, B rows of M tokens, P accepted records of each row; s a row's state in one layer, r a record of it,
w its convolution's window. An activation has `item` bytes an entry; `wide` are the four of a float32.
"""

from dataclasses import dataclass
from math import prod

from specdec.models.mixers import Attention
from specdec.state_slots.layout import StateShape

WIDE = 4


@dataclass(frozen=True, slots=True)
class Recurrent:
    """One recurrent layer's sizes in bytes."""

    state: int
    window: int
    update: int
    inputs: int

    @property
    def record(self) -> int:
        return self.update + self.inputs


def recurrent(shape: StateShape, item: int) -> Recurrent:
    """Return the sizes of a layer: a float32 state, and conv inputs in the model's dtype.

    A record has an update and its decays.
    """
    heads, key, value = shape.heads, shape.key_dim, shape.value_dim
    inputs = shape.channels * item
    return Recurrent(
        heads * key * value * WIDE,
        shape.conv_inputs * inputs,
        heads * (value + shape.decay_dim) * WIDE,
        inputs,
    )


def states(size: Recurrent, rows: int, width: int, path: int, backing: str) -> int:
    """Return the bytes of states and records: plain 2s; record 2s + (M + P)·r; snapshot (M + 1)·s.

    Convolution windows count the same way.
    """
    whole = size.state + size.window
    if backing == "snapshot":
        return rows * (width + 1) * whole
    kept = (width + path) * size.record if backing == "record" else 0
    return rows * (2 * whole + kept)


def scan_window(size: Recurrent, rows: int, width: int, path: int, backing: str) -> int:
    """Return the bytes of the recurrence alone, without the convolution's windows and inputs."""
    return states(Recurrent(size.state, 0, size.update, 0), rows, width, path, backing)


def conv(size: Recurrent, rows: int, width: int, path: int, backing: str) -> int:
    """Return the bytes of the convolution alone, with its input and output tokens: 2·T·C."""
    kept = states(Recurrent(0, size.window, 0, size.inputs), rows, width, path, backing)
    return kept + 2 * rows * width * size.inputs


def fold(size: Recurrent, rows: int, path: int) -> int:
    """Return the bytes of folding records into states and windows: 2s + P·r."""
    return rows * (2 * (size.state + size.window) + path * size.record)


def path_conv(size: Recurrent, rows: int, path: int, share: float) -> int:
    """Return the bytes of recomputing some channels: windows and record inputs read, results written."""
    return round(share * rows * (size.window + 2 * path * size.inputs))


def attention(mixer: Attention, rows: int, width: int, length: int, item: int) -> int:
    """Return an attention layer's bytes: KV in reach read, the window's written, queries and outputs."""
    kv = 2 * mixer.kv_heads * mixer.head_dim * item
    query = mixer.heads * mixer.head_dim * item
    tokens = rows * width
    seen = length if mixer.window is None else min(length, mixer.window - 1)
    return rows * (seen + width) * kv + 2 * tokens * kv + tokens * query * (3 if mixer.gated else 2)


def move(mixer: Attention, rows: int, path: int, item: int) -> int:
    """Return the bytes of moving keys and values."""
    return 2 * rows * path * 2 * mixer.kv_heads * mixer.head_dim * item


def linear(tokens: int, out: int, inner: int, item: int, weight: int) -> int:
    """Return a product's bytes: the weight, the tokens, the result."""
    return weight + tokens * (out + inner) * item


def experts(inner: int, tokens: int, distinct: int, item: int, expert: int) -> int:
    """Return the bytes of the distinct chosen experts, and of the tokens in and out."""
    return distinct * expert + 2 * tokens * inner * item


def pointwise(*shapes: tuple[int, ...], item: int) -> int:
    """Return the bytes of tensors that are read or written once each."""
    return sum(map(prod, shapes)) * item
