"""Names of models on the hub, and their folders in its cache."""

import re
from pathlib import Path
from typing import NamedTuple, Self

LONGEST = 96
"""Maximum characters of OWNER/NAME on the hub."""
MAIN = "main"
"""The default branch."""

_PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"
_REVISION = r"\w[\w.+-]*(?:/\w[\w.+-]*)*"
_TAG = r"[\w.+-]+"
HUB = r"(?:(?:https?:/{1,2})?(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/?)/"
"""The hub's address, or huggingface_hub's `hf://`; pathlib collapses the two slashes."""
OLLAMA = r"(?:https?:/{1,2})?(?:www\.|registry\.)?ollama\.(?:com|ai)/"
"""The address of Ollama's library and of its registry."""
_FORMS = [
    re.compile(form, re.ASCII)
    for form in (
        rf"(?!{HUB}|{OLLAMA})({_PART}/{_PART})(?:@({_REVISION}))?(?::({_TAG}))?",
        rf"{HUB}({_PART}/{_PART})(?:/tree/({_REVISION}))?(?::({_TAG})|/)?",
        rf"{HUB}({_PART}/{_PART})/(?:resolve|blob)/(refs/pr/\d+|[^/?#]+)/([^?#]+\.gguf)(?:\?[^#]*)?",
    )
]
"""A name, a model's page, and the page or download address of a GGUF file."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """A repository on the hub, and a branch, tag or commit of it."""

    repo: str
    revision: str = MAIN
    tag: str | None = None
    """The GGUF file: a word of its name, such as Q4_K_M, or its path."""

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse OWNER/NAME[@REVISION][:TAG] or the address of a model or a file; None if it is neither."""
        found = next((own for form in _FORMS if (own := form.fullmatch(text))), None)
        if found is None or ".." in text or "--" in found[1] or len(found[1]) > LONGEST:
            return None
        return cls(found[1], found[2] or MAIN, found[3])

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{revision}{f':{self.tag}' if self.tag else ''}"


def is_commit(revision: str) -> bool:
    """Return whether a revision is a full commit id, which is immutable."""
    return _COMMIT.fullmatch(revision) is not None


def kept_as(cache: Path, repo: str) -> Path:
    """Return a repository's folder in the hub's cache, with blobs, refs and snapshots."""
    return cache / f"models--{repo.replace('/', '--')}"
