"""Traces of requests, in the form that Marconi's have: JSON lines, a turn of a session each."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
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

    def digest(self) -> str:
        """Return what differs where anything of the turns does."""
        found = hashlib.sha256()
        for turn in self.turns:
            fields = turn.session, turn.turn, turn.ts, len(turn.prompt)
            found.update(repr(fields).encode() + turn.whole.tobytes())
        return found.hexdigest()[:16]


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_whole(v) and 0 <= v < 1 << 31 for v in value)


TOKENS = "a list of token ids, integers from 0 to 2147483647, and at least one"
FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "session_id": (lambda value: isinstance(value, str) or _is_whole(value), "a text or an integer"),
        "turn_id": (_is_whole, "an integer"),
        "ts": (_is_time, "a number of seconds from 0 on"),
        "input_tokens": (_is_tokens, TOKENS),
        "output_tokens": (_is_tokens, TOKENS),
    }
)
"""What a line must hold: the check, and the error where it fails."""


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
    turns: dict[tuple[str, int], Turn] = {}
    lines: dict[tuple[str, int], int] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                turn = _turn(line, where := f"--file: {path}, line {number}")
                key = turn.session, turn.turn
                if key in turns:
                    raise _refused(
                        f"{where}: session_id {_short(turn.session)} with turn_id {turn.turn} is in line "
                        f"{lines[key]} already; number the turns of a session, or leave one line out"
                    )
                turns[key], lines[key] = turn, number
    except OSError as error:
        raise _refused(f"--file: {path} cannot be read ({error.strerror}); name a trace") from error
    except UnicodeDecodeError as error:
        raise _refused(f"--file: {path} is not in UTF-8; name a trace, JSON lines") from error
    if not turns:
        raise _refused(f"--file: {path} holds no request; name another trace")
    return trace_of(path.stem, turns.values())


def trace_of(name: str, turns: Iterable[Turn]) -> Trace:
    """Put turns in order; of those at one time the session's own order decides."""
    return Trace(name, sorted(turns, key=lambda turn: (turn.ts, turn.session, turn.turn)))


def _turn(line: str, where: str) -> Turn:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _refused(
            f"{where}: it is no JSON; each line must be an object of {', '.join(FIELDS)}"
        ) from error
    if not isinstance(fields, dict):
        raise _refused(f"{where}: it is no object; each line must be one of {', '.join(FIELDS)}")
    for name, (is_right, what) in FIELDS.items():
        if name not in fields:
            raise _refused(f"{where}: {name} is missing; it must be {what}")
        if not is_right(fields[name]):
            raise _refused(f"{where}: {name} is {_short(fields[name])}; it must be {what}")
    return Turn(
        session=str(fields["session_id"]),
        turn=fields["turn_id"],
        ts=float(fields["ts"]),
        prompt=np.asarray(fields["input_tokens"], np.int32),
        output=np.asarray(fields["output_tokens"], np.int32),
    )


def _refused(message: str) -> ConfigError:
    return ConfigError(message, field="file")


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
