"""Traces of requests, in the form that Marconi's have: JSON lines, a turn of a session each."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import ConfigError
from specdec.state_slots.prefix.tree import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request: all that the model is given, what was said before included, and what it answers."""

    session: str
    turn: int
    ts: float
    """Seconds after the trace's start; a turn never begins before the session's last one has ended."""
    prompt: Ids
    output: Ids

    @property
    def whole(self) -> Ids:
        return np.concatenate([self.prompt, self.output])


@dataclass(frozen=True, slots=True)
class Trace:
    """Turns in the order of their times."""

    name: str
    turns: Sequence[Turn]

    @property
    def tokens(self) -> int:
        return sum(len(turn.prompt) for turn in self.turns)


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace so that Marconi's own programs read it too."""
    with path.open("w", encoding="utf-8") as file:
        for turn in trace.turns:
            fields = {
                "session_id": turn.session,
                "turn_id": turn.turn,
                "ts": turn.ts,
                "num_input_tokens": len(turn.prompt),
                "num_output_tokens": len(turn.output),
                "input_tokens": turn.prompt.tolist(),
                "output_tokens": turn.output.tolist(),
            }
            file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> Trace:
    """Read a trace from a file; what is wrong is named with its line."""
    turns = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    turns.append(_turn(line, f"--file: {path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file: {path} cannot be read ({error}); name a trace", field="file") from error
    if not turns:
        raise ConfigError(f"--file: {path} holds no request; name another trace", field="file")
    return trace_of(path.stem, turns)


def trace_of(name: str, turns: Iterable[Turn]) -> Trace:
    """Put turns in order; of those at one time the session's own order decides."""
    return Trace(name, sorted(turns, key=lambda turn: (turn.ts, turn.session, turn.turn)))


def _turn(line: str, where: str) -> Turn:
    try:
        fields = json.loads(line)
        turn = Turn(
            session=str(fields["session_id"]),
            turn=int(fields["turn_id"]),
            ts=float(fields["ts"]),
            prompt=_ids(fields["input_tokens"]),
            output=_ids(fields["output_tokens"]),
        )
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{where} is no request ({error!r}); give an object with session_id, turn_id, ts, input_tokens "
            "and output_tokens",
            field="file",
        ) from error
    if not len(turn.prompt) or not len(turn.output) or not 0 <= turn.ts < math.inf:
        raise ConfigError(
            f"{where}: input_tokens and output_tokens must hold a token each, and ts be a time from 0 on; "
            "leave the request out",
            field="file",
        )
    return turn


def _ids(values: Any) -> Ids:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise TypeError("tokens are lists of whole numbers")
    return np.asarray(values, np.int32)
