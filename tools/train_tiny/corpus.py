"""The training text: files on any machine with Python and Debian's licences, split by name."""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 3
"""Percentage of files held out."""
HELD_OUT_LICENCES = frozenset({"Artistic", "CC0-1.0", "MPL-1.1", "MPL-2.0"})
"""Held out by family: the versions of a licence share sentences, so hashing would split one text."""
LICENCES = Path("/usr/share/common-licenses")
SMALLEST, LARGEST = 200, 1_000_000
"""Characters of a file: shorter ones are useless, longer ones are tables."""
FOREIGN = 0.02
"""Share of non-ASCII characters above which a file is a character table."""

_TABLES = ("encodings/", "config-", "lib2to3/tests/data/", "test/cjkencodings", "test/tokenizedata")
_LEFT_OUT = {"site-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Document:
    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether this file is held out, decided by its name alone."""
        kind, _, rest = self.name.partition("/")
        if kind == "LICENSE":
            return rest in HELD_OUT_LICENCES
        return int(hashlib.sha1(self.name.encode()).hexdigest(), 16) % 100 < HELD_OUT


def standard_library() -> Path:
    """Return the folder of Python's own sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect(sources: Path | None = None, licences: Path = LICENCES) -> list[Document]:
    """Return the documents sorted by name, without duplicates and tables."""
    seen: set[str] = set()
    kept = []
    for document in (*_sources(sources or standard_library()), *_licences(licences)):
        text = document.text
        if document.name.startswith(_TABLES) or not SMALLEST <= len(text) <= LARGEST or text in seen:
            continue
        if sum(ord(letter) > 127 for letter in text) <= FOREIGN * len(text):
            seen.add(text)
            kept.append(document)
    return kept


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Split the documents into training and held-out ones."""
    held_out = [document for document in documents if document.is_held_out]
    return [document for document in documents if not document.is_held_out], held_out


def _sources(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _LEFT_OUT.intersection(name.parts):
            try:
                yield Document(name.as_posix(), path.read_text("utf-8"))
            except UnicodeDecodeError:
                continue  # sources in other encodings test the parser


def _licences(root: Path) -> Iterator[Document]:
    if root.is_dir():
        for path in sorted(root.iterdir()):
            if path.is_file() and not path.is_symlink():
                yield Document(f"LICENSE/{path.name}", path.read_text("utf-8", errors="replace"))
