"""What a policy made of a trace, as figures: tokens hit, work saved, bytes held, by the length of prompts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.bench.prefix.simulate import Course
from specdec.bench.prefix.traces import Turn
from specdec.state_slots.prefix.score import Work

EDGES = (512, 1024, 2048, 4096, 8192, 16384)
"""Where the bins of prompts' lengths end."""

Record = Mapping[str, Any]


def bin_of(length: int) -> int:
    return sum(length > edge for edge in EDGES)


def bin_name(number: int) -> str:
    """Name a bin by its ends, in tokens."""
    low = EDGES[number - 1] + 1 if number else 1
    return f"{low}-{EDGES[number]}" if number < len(EDGES) else f"{low}+"


def figures(turns: Sequence[Turn], course: Course, work: Work) -> dict[str, Any]:
    """Sum up a run of a trace."""
    pairs = [(len(turn.prompt), hit) for turn, hit in zip(turns, course.hits, strict=True)]
    count = max(len(course.held), 1)
    return {
        **_sums(pairs, work),
        "refused": course.refused,
        "kv_bytes": sum(kv for kv, _ in course.held) / count,
        "state_bytes": sum(states for _, states in course.held) / count,
        "bins": list(_bins(pairs, work)),
    }


def _bins(pairs: Sequence[tuple[int, int]], work: Work) -> Iterator[dict[str, Any]]:
    for number in range(len(EDGES) + 1):
        if own := [pair for pair in pairs if bin_of(pair[0]) == number]:
            yield {"tokens_each": bin_name(number), **_sums(own, work)}


def _sums(pairs: Sequence[tuple[int, int]], work: Work) -> dict[str, Any]:
    tokens, hit = (sum(column) for column in zip(*pairs, strict=True))
    whole, saved = sum(work(length) for length, _ in pairs), sum(work(own) for _, own in pairs)
    return {
        "requests": len(pairs),
        "requests_hit": sum(own > 0 for _, own in pairs),
        "tokens": tokens,
        "tokens_hit": hit,
        "hit_rate": hit / tokens,
        "flops": whole,
        "flops_saved": saved,
        "flops_saved_share": saved / whole,
    }
