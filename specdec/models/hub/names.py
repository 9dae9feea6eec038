"""What names a model on the hub, and where its cache keeps one."""

import re
from pathlib import Path
from typing import NamedTuple, Self

LONGEST = 96
"""Characters of OWNER/NAME, as the hub has it."""
MAIN = "main"
"""The branch that is meant where no revision is named."""

_PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"
_REVISION = r"\w[\w.+-]*(?:/\w[\w.+-]*)*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@({_REVISION}))?", re.ASCII)
_ADDRESS = re.compile(
    rf"(?:https?:/{{1,2}})?(?:www\.)?(?:huggingface\.co|hf\.co)/({_PART}/{_PART})(?:/tree/({_REVISION}))?/?",
    re.ASCII,
)
"""A model's page; a Path has joined the two slashes behind `https:`."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """A repository on the hub, and a branch, tag or commit of it."""

    repo: str
    revision: str = MAIN

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse OWNER/NAME, OWNER/NAME@REVISION or the address of a model's page; None if it is neither."""
        found = _NAME.fullmatch(text) or _ADDRESS.fullmatch(text)
        if found is None or ".." in text or "--" in found[1] or len(found[1]) > LONGEST:
            return None
        return cls(found[1], found[2] or MAIN)

    def __str__(self) -> str:
        return self.repo if self.revision == MAIN else f"{self.repo}@{self.revision}"


def is_commit(revision: str) -> bool:
    """Tell whether a revision is a whole commit id, which always means the same files."""
    return _COMMIT.fullmatch(revision) is not None


def kept_as(cache: Path, repo: str) -> Path:
    """Return where the hub's cache keeps a repository: its blobs, refs and snapshots."""
    return cache / f"models--{repo.replace('/', '--')}"
