"""Which of the GGUF files of a folder or a repository is meant, told by their names."""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath

MAGIC = b"GGUF"
"""What a file begins with."""
SUFFIX = ".gguf"
DEFAULTS = ("Q4_K_M", "Q8_0")
"""What is taken where no tag is given, as by llama.cpp and Ollama; then the first file."""
BESIDE = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""In the names of files that are no model of their own: vision towers, statistics, draft heads."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_TAG = re.compile(r"[-.]((?:UD-)?\w+)$", re.ASCII)


def models(files: Iterable[str]) -> list[str]:
    """List the files that are models: those of one that is split by its first part."""
    named = [file for file in files if file.endswith(SUFFIX)]
    own = [file for file in named if not any(word in PurePosixPath(file).name for word in BESIDE)]
    return sorted(file for file in own if not (part := _PART.fullmatch(file)) or int(part[2]) == 1)


def parts(file: str) -> list[str]:
    """List the files of a model, all parts of one that is split."""
    if not (found := _PART.fullmatch(file)):
        return [file]
    return [f"{found[1]}-{i:05}-of-{found[3]}{SUFFIX}" for i in range(1, int(found[3]) + 1)]


def tagged(files: Collection[str], tag: str | None) -> str | None:
    """Return the model that a tag means, without case, or the file of that path; no tag: the default."""
    if tag in files:
        return tag
    known = models(files)
    for wanted in DEFAULTS if tag is None else (tag,):
        named = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}[-./]", re.IGNORECASE)
        if found := [file for file in known if named.search(file)]:
            return found[0]
    return known[0] if known and tag is None else None


def tags(files: Iterable[str]) -> Sequence[str]:
    """List what the models among some files are called by: the last word of their names."""
    bare = (parts(file)[0].removesuffix(SUFFIX) for file in models(files))
    words = (_TAG.search(re.sub(r"-\d{5}-of-\d{5}$", "", name)) for name in bare)
    return list(dict.fromkeys(word[1] for word in words if word))
