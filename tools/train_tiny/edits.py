"""Repetitive texts: an original, an instruction, and the start of the edit."""

import ast
import io
import json
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple, TypeGuard

OTHER_NAMES = {
    "name": "label",
    "path": "location",
    "value": "item",
    "string": "text",
    "result": "answer",
    "data": "content",
    "line": "row",
    "node": "element",
    "pattern": "expression",
    "code": "program",
}
"""New names for renamed variables; others get a prefix."""
HINTS = {"name": "str", "path": "str", "text": "str", "string": "str", "pattern": "str", "index": "int"}
HINTS |= {"size": "int", "count": "int", "flags": "int", "args": "Any", "kwds": "Any", "kwargs": "Any"}
SHORTEST_NAME, FEWEST_USES = 3, 3
ROWS = 7
"""Functions per table."""
LEFT = 240
"""Minimum characters left to generate: most of 128 tokens."""


class Edit(NamedTuple):
    kind: str
    place: str
    """The source lines, as `first-last`."""
    text: str


class Change(NamedTuple):
    """An instruction, and the complete edited text."""

    instruction: str
    edited: str


def edits(source: str, longest: int) -> Iterator[Edit]:
    """Yield all supported edits of a source's functions, except those that are too long."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        children = body if isinstance(body, list) else []
        functions = [child for child in children if _is_plain(child) and _stands_alone(lines, child)]
        for function in functions:
            original = _text(lines, function)
            if not LEFT <= len(original) <= longest:
                continue
            for kind, change in CHANGES.items():
                if made := change(original):
                    yield Edit(kind, _place(function, function), _begun(original, made))
        for first, second in pairwise(functions):
            originals = [_text(lines, first), _text(lines, second)]
            made = Change("# The same functions in reverse order:", "\n".join(reversed(originals)))
            yield Edit("reorder", _place(first, second), _begun("\n".join(originals), made))
    listed = [node for node in ast.walk(tree) if _is_plain(node)]
    for start in range(0, len(listed) - ROWS + 1, ROWS):
        rows = [(node.name, node.lineno, len(node.args.args)) for node in listed[start : start + ROWS]]
        for kind, table in TABLES.items():
            # A table contains no function text: it claims only the first one's line.
            made = Change("The same with 'line' renamed to 'row':", table(rows, "row"))
            yield Edit(kind, f"{rows[0][1]}-{rows[0][1]}", _begun(table(rows, "line"), made))


def rename(original: str) -> Change | None:
    """Rename the most used name of a function, unless an attribute or a keyword shares it."""
    tree = ast.parse(original)
    used = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    used.update(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
    taken = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    taken |= {node.arg or "" for node in ast.walk(tree) if isinstance(node, ast.keyword)} | {"self", "cls"}
    fitting = [name for name, uses in used.items() if len(name) >= SHORTEST_NAME and uses >= FEWEST_USES]
    name = max(
        (name for name in fitting if name not in taken), key=lambda name: (used[name], name), default=None
    )
    if name is None:
        return None
    other = OTHER_NAMES.get(name, f"new_{name}")
    return Change(f"# The same function with {name!r} renamed to {other!r}:", _replace(original, name, other))


def add_docstring(original: str) -> Change | None:
    """Add a docstring made of the function name's words, if there is none."""
    function = _parsed(original)
    header = _header(original, function)
    if header is None or ast.get_docstring(function):
        return None
    words = function.name.strip("_").replace("_", " ").capitalize()
    docstring = f'    """{words}."""\n'
    return Change("# The same function with a docstring:", header + docstring + original[len(header) :])


def add_hints(original: str) -> Change | None:
    """Annotate a function's arguments by their names, and its return value."""
    function = _parsed(original)
    header = _header(original, function)
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    if header is None or function.decorator_list or function.returns or len(arguments) < 2:
        return None
    for argument in arguments:
        if argument.arg not in ("self", "cls"):
            argument.annotation = ast.Name(HINTS.get(argument.arg, "object"))
    gives = any(isinstance(node, ast.Return) and node.value for node in ast.walk(function))
    function.returns = ast.Name("object") if gives else ast.Constant(None)
    function.body = [ast.Pass()]
    hinted = ast.unparse(function).splitlines()[0]
    return Change("# The same function with type hints:", f"{hinted}\n{original[len(header) :]}")


def make_coroutine(original: str) -> Change | None:
    """Put `async` in front of a function."""
    if _parsed(original).decorator_list:
        return None
    return Change("# The same function as a coroutine:", f"async {original}")


CHANGES: dict[str, Callable[[str], Change | None]] = {
    "rename": rename,
    "docstring": add_docstring,
    "hints": add_hints,
    "coroutine": make_coroutine,
}

Row = tuple[str, int, int]


def _as_json(rows: Sequence[Row], label: str) -> str:
    objects = (json.dumps({"name": name, label: line, "arguments": count}) for name, line, count in rows)
    return "[\n" + ",\n".join(f"  {item}" for item in objects) + "\n]\n"


def _as_ini(rows: Sequence[Row], label: str) -> str:
    return "\n".join(f"[{name}]\n{label} = {line}\narguments = {count}\n" for name, line, count in rows)


def _as_table(rows: Sequence[Row], label: str) -> str:
    head = f"| name | {label} | arguments |\n| --- | --- | --- |\n"
    return head + "".join(f"| {name} | {line} | {count} |\n" for name, line, count in rows)


TABLES: dict[str, Callable[[Sequence[Row], str], str]] = {
    "json": _as_json,
    "ini": _as_ini,
    "table": _as_table,
}

KINDS = (*CHANGES, "reorder", *TABLES)


def _begun(original: str, change: Change) -> str:
    """Join original, instruction and the edit up to its first difference; empty if too little is left."""
    before, after = (text.splitlines(keepends=True) for text in (original, change.edited))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    if sum(map(len, after[same + 1 :])) < LEFT:
        return ""
    return f"{original}\n{change.instruction}\n\n{''.join(after[: same + 1])}"


def _replace(original: str, name: str, other: str) -> str:
    lines = original.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(original).readline))
    for token in reversed([t for t in tokens if t.type == tokenize.NAME and t.string == name]):
        row, start = token.start
        line = lines[row - 1]
        lines[row - 1] = line[:start] + other + line[start + len(name) :]
    return "".join(lines)


def _is_plain(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef)


def _parsed(original: str) -> ast.FunctionDef:
    function = ast.parse(original).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


def _header(original: str, function: ast.FunctionDef) -> str | None:
    """Return the line with `def`, if the header has no other lines."""
    lines = original.splitlines(keepends=True)
    return lines[0] if function.body[0].lineno == 2 and not function.decorator_list else None


def _text(lines: Sequence[str], node: ast.FunctionDef) -> str:
    """Return a function's source without its indentation."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))


def _stands_alone(lines: Sequence[str], node: ast.FunctionDef) -> bool:
    """Return whether a function can be dedented completely: strings may hold unindented lines."""
    return not _text(lines, node)[0].isspace()


def _place(first: ast.FunctionDef, last: ast.FunctionDef) -> str:
    return f"{first.lineno}-{last.end_lineno}"
