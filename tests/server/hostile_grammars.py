"""Hostile grammars beside a stream: `python -m tests.server.hostile_grammars --count 10000`.

Regular expressions, JSON schemas and grammars, drawn with a seed from known slow patterns: nested
repetitions, overlapping alternatives, ambiguous texts, deep nesting, large counts. Each is requested by a
client that goes on as long as it may. Meanwhile another reads a stream; the figure is its longest wait
between two chunks.
"""

import argparse
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.server.live import Live

KNOWN = ("(((((x{0,60}){0,50}){0,50}){0,50}){0,50})", "((x{0,60}){0,40}){0,40}", "(x+x+)+y", "(x|xx|xxx)*y")


@dataclass
class Found:
    """The results."""

    gap_s: float = 0.0
    pieces: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    unhealthy: int = 0


def regex(draw: random.Random, depth: int = 0) -> str:
    if depth > 4 or draw.random() < 0.2:
        return draw.choice(
            ("x", "xx", "[a-z]", ".", "\\w", "(x|xx)", "[^y]", "\\d", "é", "x?", "", "\\", "[", "$")
        )
    inner = regex(draw, depth + 1)
    count = draw.choice((1, 2, 9, 50, 60, 1000, 10**6, 10**20))
    match draw.randrange(6):
        case 0:
            return f"({inner}){{0,{count}}}"
        case 1:
            return f"({inner}){{{count}}}"
        case 2:
            return f"({inner}){draw.choice('*+?')}"
        case 3:
            return inner + regex(draw, depth + 1)
        case 4:
            return f"({inner}|{regex(draw, depth + 1)})"
        case _:
            return inner * draw.choice((2, 5, 60))


def schema(draw: random.Random, depth: int = 0) -> Any:
    if depth > 4 or draw.random() < 0.2:
        count = draw.choice((0, 1, 50, 10**4, 10**9))
        return draw.choice(
            (
                {"type": "string", "maxLength": count},
                {"type": "string", "pattern": regex(draw)},
                {"enum": ["x" * n for n in range(draw.choice((1, 9, 300)))]},
                {"type": "integer", "minimum": -count, "maximum": count},
                {"$ref": "#"},
                {},
                True,
            )
        )
    inner = schema(draw, depth + 1)
    many = draw.choice((1, 2, 9, 60))
    return draw.choice(
        (
            {"type": "array", "items": inner, "maxItems": draw.choice((1, 60, 10**5))},
            {"type": "object", "properties": {"x" * n: inner for n in range(many)}},
            {"anyOf": [inner, *(schema(draw, depth + 1) for _ in range(min(many, 9)))]},
            {"type": "object", "patternProperties": {regex(draw, 3): inner}},
            {"type": "object", "additionalProperties": inner},
        )
    )


def grammar(draw: random.Random) -> str:
    names = ["root", *"abcdefgh"[: draw.randrange(8)]]
    parts = (
        *names,
        '"x"',
        '"xx"',
        "[a-z]",
        "root root",
        '"x"*',
        "(root)*",
        '"x"{0,50}',
        f"{names[-1]}{{0,60}}",
        '""',
    )
    rules = []
    for name in names:
        options = [" ".join(draw.choices(parts, k=draw.randrange(1, 4))) for _ in range(draw.randrange(1, 4))]
        rules.append(f"{name} ::= {' | '.join(options)}")
    return "\n".join(rules)


def hostile(draw: random.Random) -> dict[str, Any]:
    """Draw one grammar."""
    match draw.randrange(8):
        case 0:
            return {"regex": draw.choice(KNOWN)}
        case 1 | 2:
            return {"regex": regex(draw) or "x"}
        case 3 | 4:
            return {"json": schema(draw)}
        case 5 | 6:
            return {"grammar": grammar(draw)}
        case _:
            brackets = draw.choice(("()", "[]", "{}"))
            nest = draw.choice((10, 100, 3000))
            return {"regex": brackets[0] * nest + "x" + brackets[1] * nest}


def attack(live: Live, forms: Sequence[dict[str, Any]], *, at_once: int, bias: dict[str, float]) -> Found:
    """Request all grammars, `at_once` concurrently, beside a stream that runs until all are answered."""
    found, over = Found(), threading.Event()
    reading = threading.Thread(target=_read, args=(live, over, found))
    reading.start()

    def ask(form: dict[str, Any]) -> int:
        body = {
            "prompt": "x",
            "max_tokens": 40,
            "min_tokens": 40,
            "logit_bias": bias,
            "structured_outputs": form,
        }
        return live.ask("/v1/completions", body).status

    with ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(ask, form) for form in forms]
        for own in asked:
            found.statuses[own.result()] += 1
            found.unhealthy += live.ask("/health").status != 200 if found.statuses.total() % 10 == 0 else 0
    over.set()
    reading.join()
    return found


def _read(live: Live, over: threading.Event, found: Found) -> None:
    """Read one stream after another, and record the longest gap between chunks."""
    address = urlsplit(live.url)
    while not over.is_set():
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
        body = {"prompt": "def f(x):\n", "max_tokens": 2000, "ignore_eos": True, "stream": True, "seed": 1}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response, last_s = connection.getresponse(), None
        while not over.is_set() and (line := response.readline()):
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                found.gap_s = max(found.gap_s, now_s - last_s if last_s else 0.0)
                last_s, found.pieces = now_s, found.pieces + 1
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="forms (%(default)s)")
    parser.add_argument("--at-once", type=int, default=12, help="clients (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, default=250, help="forms between two lines of the report")
    own = parser.parse_args()
    draw = random.Random(own.seed)
    with Live() as live:
        bias = x_bias(live)
        for start in range(0, own.count, own.round):
            forms = [hostile(draw) for _ in range(min(own.round, own.count - start))]
            found = attack(live, forms, at_once=own.at_once, bias=bias)
            print(
                f"{start + len(forms)} forms: longest gap {found.gap_s * 1e3:.0f} ms of {found.pieces}, "
                f"{dict(found.statuses)}, not healthy {found.unhealthy} times",
                flush=True,
            )


def x_bias(live: Live) -> dict[str, float]:
    """Return a logit bias for the letter that hostile grammars repeat."""
    return {str(token): 50.0 for token in live.ask("/tokenize", {"prompt": "x"}).json["tokens"]}


if __name__ == "__main__":
    main()
