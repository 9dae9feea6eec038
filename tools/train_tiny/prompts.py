"""Generate the shipped prompts from held-out texts: run `python -m tools.train_tiny.prompts`.

Selection is by hashes of names and positions, so the same texts give the same prompts. The committed files in
`specdec/assets/prompts` are its output under Python 3.11.7 and Debian 12.
"""

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tools.train_tiny.corpus import Document, collect, split, standard_library
from tools.train_tiny.edits import KINDS, edits
from tools.train_tiny.passages import Passages

FOLDER = Path(__file__).parents[2] / "specdec" / "assets" / "prompts"
PER_SET, PER_SOURCE = 64, 16
"""Prompts in each set, and how many of each kind the mixed set has, distinct from the other sets."""
SHORTEST, LONGEST = 320, 700
"""In characters: 100 to 220 tokens of 3.2 bytes."""
FOLLOWING = 400
"""Minimum characters after a prompt in its text, so that there is something to predict."""
PYTHON_LICENCE = "LICENSE.txt"
"""The standard library's licence: not a source file, and so in no corpus."""


class Piece(NamedTuple):
    """A candidate prompt with its source position."""

    source: str
    place: str
    text: str
    kind: str = ""
    """The kind of edit it begins."""

    @property
    def order(self) -> str:
        """The candidates' order: random but reproducible."""
        return hashlib.sha1(self.name.encode()).hexdigest()

    @property
    def name(self) -> str:
        return f"{self.source}:{self.place}{self.kind and f' {self.kind}'}"


def make(documents: Sequence[Document], known: Passages) -> dict[str, list[Piece]]:
    """Cut the four sets out of held-out sources and licences, excluding passages in `known`.

    Each prompt is in one set only.
    """
    prose = [document for document in documents if document.name.startswith("LICENSE")]
    sources = [document for document in documents if document not in prose]

    def cut(documents: Sequence[Document], pieces: Callable[[Document], Iterator[Piece]]) -> list[Piece]:
        return new(chain.from_iterable(map(pieces, documents)))

    def new(pieces: Iterable[Piece]) -> list[Piece]:
        return [piece for piece in take(pieces) if not known.shared_with(piece.text)]

    edited = [piece for document in sources for piece in edit(document)]
    by_kind = [new(piece for piece in edited if piece.kind == kind) for kind in KINDS]
    sets = {
        "code": cut(sources, code)[: PER_SET + PER_SOURCE],
        "edit": _apart(_in_turn(by_kind)),
        "prose": cut(prose, paragraphs),
    }
    others = [piece for pieces in sets.values() for piece in pieces[PER_SET : PER_SET + PER_SOURCE]]
    texts = _apart([*sets["code"], *cut(sources, documentation)])[len(sets["code"]) :]
    mixed = others + texts[:PER_SOURCE]
    return {**{name: pieces[:PER_SET] for name, pieces in sets.items()}, "mixed": mixed}


def take(pieces: Iterable[Piece]) -> list[Piece]:
    """Return non-overlapping pieces ordered by hash, alternating between sources."""
    groups: dict[str, list[Piece]] = {}
    for piece in _apart(sorted(pieces, key=lambda piece: piece.order)):
        groups.setdefault(piece.source, []).append(piece)
    return list(_in_turn(list(groups.values())))


def _in_turn(groups: Sequence[Sequence[Piece]]) -> Iterator[Piece]:
    """Yield the first item of each group, then the second of each, and so on."""
    for place in range(max(map(len, groups), default=0)):
        yield from (group[place] for group in groups if place < len(group))


def _apart(pieces: Iterable[Piece]) -> list[Piece]:
    """Drop pieces that share a source line with an earlier one."""
    kept: list[Piece] = []
    used: set[tuple[str, int]] = set()
    for piece in pieces:
        first, last = map(int, piece.place.split("-"))
        lines = {(piece.source, line) for line in range(first, last + 1)}
        if not lines & used:
            kept.append(piece)
            used |= lines
    return kept


def code(document: Document) -> Iterator[Piece]:
    """Yield starts of a source that end inside a function, after part of its body."""
    lines = document.text.splitlines(keepends=True)
    for node in _functions(document):
        last = node.end_lineno or node.lineno
        for end in range(node.body[0].lineno, last - 1):
            yield from _window(document, lines, end)


def paragraphs(document: Document) -> Iterator[Piece]:
    """Yield parts of a text that start with a paragraph and end inside one."""
    lines = document.text.splitlines(keepends=True)
    for end in range(1, len(lines)):
        if lines[end - 1].strip() and lines[end].strip():
            yield from _window(document, lines, end)


def documentation(document: Document) -> Iterator[Piece]:
    """Yield parts of a source that end inside a long docstring."""
    lines = document.text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(document.text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            string = node.body[0]
            for end in range(string.lineno + 3, (string.end_lineno or 0) - 3):
                yield from _window(document, lines, end)


def edit(document: Document) -> Iterator[Piece]:
    """Yield originals followed by the start of an edit."""
    for kind, place, text in edits(document.text, LONGEST):
        if SHORTEST <= len(text) <= LONGEST:
            yield Piece(document.name, place, text, kind)


def _window(document: Document, lines: Sequence[str], end: int) -> Iterator[Piece]:
    """Yield a text that starts after an empty line and ends with line `end`; a hash decides its length."""
    if not lines[end - 1].strip() or sum(map(len, lines[end : end + FOLLOWING])) < FOLLOWING:
        return
    drawn = int(hashlib.sha1(f"{document.name} {end}".encode()).hexdigest(), 16)
    longest = LONGEST - drawn % ((LONGEST - SHORTEST) // 2)
    size, found = 0, None
    for start in range(end - 1, -1, -1):
        size += len(lines[start])
        if size > longest:
            break
        begins = start == 0 or not lines[start - 1].strip()
        if size >= SHORTEST and begins and lines[start].strip():
            found = start
    if found is not None:
        yield Piece(document.name, f"{found + 1}-{end}", "".join(lines[found:end]))


def _functions(document: Document) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(document.text)):
        if isinstance(node, ast.FunctionDef):
            yield node


def make_here() -> dict[str, list[Piece]]:
    """Generate the sets from this machine's held-out texts, checked against its training texts."""
    trained, held_out = split(collect())
    licence = Document(PYTHON_LICENCE, (standard_library() / PYTHON_LICENCE).read_text("utf-8"))
    return make([*held_out, licence], Passages(document.text for document in trained))


def write(sets: dict[str, list[Piece]], folder: Path) -> None:
    """Write each set as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for category, pieces in sets.items():
        lines = (
            json.dumps(
                {"category": category, "name": piece.name, "prompt": piece.text},
                ensure_ascii=False,
            )
            for piece in pieces
        )
        (folder / f"{category}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def main() -> None:
    """Write the sets into the package."""
    write(make_here(), FOLDER)


if __name__ == "__main__":
    main()
