"""A server's reading as lines for a terminal of any size, with or without colours."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

from specdec.cli.text import ACCEPTED, PLAIN, binary, visible
from specdec.cli.top.reading import CounterGrowth, PrefixCacheUsage, ServerReading, shares

BOLD, ALARM, INVERSE = "\x1b[1m", "\x1b[31m", "\x1b[7m"
CLASSES: Mapping[str, tuple[str, str]] = {
    "KV blocks": ("K", "\x1b[36m"),
    "states": ("S", "\x1b[34m"),
    "drafts": ("D", ACCEPTED),
    "prefixes": ("P", "\x1b[33m"),
    "holes": ("H", ALARM),
    "free": (".", ""),
}
"""Classes of the arena's memory: the letter and the colour of each."""
MARGIN, WIDEST = 11, 84
"""Columns of the names at the left, and the last column of a bar."""
NARROWEST = 8
UNKNOWN = "-"
"""Placeholder for unknown values and for shares of zero."""


class StyledText(NamedTuple):
    text: str
    style: str = ""


Line = Sequence[StyledText]


def picture(reading: ServerReading, growth: CounterGrowth | None, width: int) -> list[Line]:
    """Draw a server; without growth, current rates are unknown."""
    drafters = ", ".join(reading.drafters) or "none"
    lines: list[Line] = [
        [StyledText(f"specdec {reading.version} on {reading.runs}, drafters: {drafters}")],
        [],
        *_requests(reading, growth),
        *_speculation(reading, growth, width),
        [],
        *_arena(reading.arena, width),
        [],
    ]
    if reading.prefixes:
        lines += _prefixes(reading.prefixes, reading.counts, growth)
    else:
        lines.append(_named("prefixes", "not cached: the server runs with --no-prefix-cache"))
    moved = f"{reading.counts['moved_blocks']:,} blocks, to free whole slabs"
    preempted, failed = reading.counts["preemptions"], reading.counts["failed_steps"]
    failures = f"{failed:,} failed steps; {preempted:,} preemptions"
    return [*lines, _named("moved", moved), _named("failures", failures, ALARM if failed else "")]


def heading(
    model: str | None, url: str, watched_s: float, problem: str | None, read_s: float | None = None
) -> list[Line]:
    """Draw the header: the server, its failure if unreachable, and the age of the reading."""
    names = [StyledText(f"{model} ", BOLD)] if model else []
    lines: list[Line] = [[*names, StyledText(f"at {url}, polled for {_clock(watched_s)}")]]
    if problem:
        lines.append([StyledText(problem, ALARM)])
        if read_s is not None:
            lines.append([StyledText(f"the figures below are {_clock(read_s)} old", ALARM)])
    return lines


def shown(lines: Sequence[Line], *, width: int | None, coloured: bool) -> list[str]:
    """Render lines, without control characters and cut to the terminal's width."""
    return [_shown(line, width, coloured=coloured) for line in lines]


def _shown(line: Line, width: int | None, *, coloured: bool) -> str:
    output = ""
    for piece in line:
        text = visible(piece.text.replace("\n", " ").replace("\t", " "))[:width]
        width = None if width is None else width - len(text)
        output += f"{piece.style}{text}{PLAIN}" if coloured and piece.style and text else text
    return output


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _requests(reading: ServerReading, growth: CounterGrowth | None) -> list[Line]:
    current = _counted(growth.limited_by) or "nothing" if growth else UNKNOWN
    total = _counted(reading.limited_by) or "nothing"
    running = f"{reading.running} running (max {reading.max_running}), {reading.waiting} waiting"
    return [_named("requests", running), _named("limited by", f"{current} now, {total} overall (steps)")]


def _counted(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:,}" for name, count in ordered if count)


def _speculation(reading: ServerReading, growth: CounterGrowth | None, width: int) -> list[Line]:
    delta, counts = growth.counts if growth else {}, reading.counts
    speed = f"{delta['tokens'] / growth.seconds:,.1f}" if growth else UNKNOWN
    length = f"{delta['tokens'] / delta['steps']:.2f}" if delta.get("steps") else UNKNOWN
    overall = f"{reading.acceptance_length:.2f}" if counts["steps"] else UNKNOWN
    recent, total = _share(delta, "accepted", "drafted"), _share(counts, "accepted", "drafted")
    depths = " ".join(f"{share:.0%}" for share in reading.per_depth)
    first, *more = wrap(reading.drafting or UNKNOWN, max(min(width, WIDEST) - MARGIN, NARROWEST))
    return [
        _named("speed", f"{speed} tokens/s", ACCEPTED),
        _named("acceptance", f"{length} tokens per step now, {overall} overall"),
        _named("", f"{recent} of draft tokens now, {total} overall"),
        _named("by depth", f"{depths or UNKNOWN} overall"),
        _named("drafting", first),
        *(_named("", line) for line in more),
    ]


def _arena(arena: Mapping[str, int], width: int) -> list[Line]:
    total = sum(arena.values())
    available = max(min(width, WIDEST) - MARGIN, NARROWEST)
    cells = zip(arena, shares(list(arena.values()), available), strict=True)
    bar = [StyledText(CLASSES[name][0] * count, _filled(CLASSES[name][1])) for name, count in cells]
    lines: list[Line] = [[*_named("arena", ""), *bar]]
    for name, count in arena.items():
        letter, style = CLASSES[name]
        share = f"{count / total:.0%}" if total else UNKNOWN
        label = f" {name:<10} {binary(count):>11} {share:>5}"
        lines.append([StyledText(" " * MARGIN), StyledText(letter, _filled(style)), StyledText(label)])
    return lines


def _filled(style: str) -> str:
    return style and style + INVERSE


def _prefixes(
    prefixes: PrefixCacheUsage, counts: Mapping[str, int], growth: CounterGrowth | None
) -> list[Line]:
    delta = growth.counts if growth else {}
    recent, overall = _share(delta, "hit", "asked"), _share(counts, "hit", "asked")
    policy = "" if prefixes.alpha is None else f"; alpha {prefixes.alpha:g}"
    return [
        _named("prefixes", f"{recent} of prompt tokens cached now, {overall} overall"),
        _named("", f"{counts['fetched']:,} tokens loaded from host memory overall"),
        _named("", f"states: {prefixes.states:,} cached, {counts['states_evicted']:,} evicted"),
        _named("", f"blocks: {prefixes.blocks:,} cached, {counts['blocks_evicted']:,} evicted{policy}"),
    ]


def _named(name: str, text: str, style: str = "") -> Line:
    return [StyledText(name.ljust(MARGIN), BOLD if name else ""), StyledText(text, style)]


def _share(counts: Mapping[str, int], part: str, whole: str) -> str:
    return f"{counts[part] / counts[whole]:.0%}" if counts.get(whole) else UNKNOWN
