"""Product of nested counted repetitions: `(x{0,60}){0,50}` repeats 3,000 times.

A text of such a grammar has as many parses, all of which have to be followed.
"""

import json
import re
from collections.abc import Iterator, Mapping

MOST = 100_000
"""Maximum product of nested repetitions."""
COUNTLESS = 1 << 60
COUNT = r"\{(?P<least>[0-9]*),?(?P<most>[0-9]*)\}"
REGEX = re.compile(
    rf"{COUNT}|(?P<open>\()|(?P<close>\))|\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|$)|(?P<alike>[*+?])|.", re.DOTALL
)
GRAMMAR = re.compile(
    rf'{COUNT}|(?P<open>\()|(?P<close>\))|#[^\n]*|"(?:\\.|[^"\\])*(?:"|$)|\[(?:\\.|[^\]\\])*(?:\]|$)'
    r"|(?P<rule>[A-Za-z_][\w.-]*)\s*::=|(?P<name>[A-Za-z_][\w.-]*)|(?P<alike>[*+?\s])|.",
    re.DOTALL,
)
"""The parts of a text; a name alone refers to its rule."""


def check_repetitions(kind: str, source: str) -> None:
    """Refuse a grammar whose nested repetitions exceed the maximum."""
    most = max((_product(*own) for own in _sources(kind, source)), default=1)
    if most > MOST:
        raise ValueError(f"its nested counted repetitions come to {most:.4g}, more than {MOST:,}")


def _product(pattern: re.Pattern[str], text: str) -> int:
    """Return the largest product of nested repetitions in a text, following references."""
    bodies: dict[str, list[re.Match[str]]] = {"": []}
    own = bodies[""]
    for match in pattern.finditer(text):
        if name := match.groupdict().get("rule"):
            own = bodies.setdefault(name, [])
        else:
            own.append(match)
    known: dict[str, int] = {}
    for name in _in_order(bodies):
        known[name] = _repeated(bodies[name], known)
    return max(known.values())


def _in_order(bodies: Mapping[str, list[re.Match[str]]]) -> Iterator[str]:
    """Yield each rule after those it references, except in cycles."""
    passed: set[str] = set()
    left = [(name, False) for name in bodies]
    while left:
        name, done = left.pop()
        if done:
            yield name
        elif name not in passed:
            passed.add(name)
            left.append((name, True))
            named = dict.fromkeys(match.groupdict().get("name") or "" for match in bodies[name])
            left += [(own, False) for own in named if own in bodies and own not in passed]


def _repeated(body: list[re.Match[str]], known: Mapping[str, int]) -> int:
    """Return the largest product within a text, given those of the rules it references."""
    groups, last = [1], 1
    for match in body:
        found = match.groupdict()
        if found["open"]:
            groups.append(1)
        elif found["close"]:
            last = groups.pop() if len(groups) > 1 else last
        elif found["least"] or found["most"]:
            last = min(last * max(_number(found["most"]), _number(found["least"]), 1), COUNTLESS)
        elif not found["alike"]:
            last = known.get(found.get("name") or "", 1)
        groups[-1] = max(groups[-1], last)
    return max(groups)


def _number(digits: str) -> int:
    return int(digits or 0) if len(digits) < 20 else COUNTLESS


def _sources(kind: str, source: str) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield the regular expressions and grammars of a request, each with its tokenizing pattern."""
    if kind == "regex":
        yield REGEX, source
    elif kind == "grammar":
        yield GRAMMAR, source
    elif kind in ("json_schema", "structural_tag"):
        try:
            left = [json.loads(source)]
        except (ValueError, RecursionError):
            return  # refused elsewhere
        while left:
            own = left.pop()
            if isinstance(own, Mapping):
                patterns = own.get("patternProperties")
                named = [own.get("pattern"), *(patterns if isinstance(patterns, Mapping) else ())]
                yield from ((REGEX, text) for text in named if isinstance(text, str))
                if isinstance(grammar := own.get("grammar"), str):
                    yield GRAMMAR, grammar
                left += own.values()
            elif isinstance(own, list):
                left += own
