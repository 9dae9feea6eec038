"""Choose among the GGUF files of a folder or repository by name."""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath

MAGIC = b"GGUF"
"""A file's first bytes."""
SUFFIX = ".gguf"
DEFAULTS = ("Q4_K_M", "Q8_0")
"""Defaults without a tag, as in llama.cpp and Ollama; then the first file."""
BESIDE = re.compile(r".*(?:mmproj|imatrix)|mtp-|eagle3-|dflash-|dspark-")
"""Names of files that are not models: vision towers, statistics, draft heads."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_TAG = re.compile(r"[-.]((?:UD-)?\w+)$", re.ASCII)


def models(files: Iterable[str]) -> list[str]:
    """Return the files that are models; a split one is represented by its first part."""
    named = [file for file in files if file.endswith(SUFFIX)]
    own = [file for file in named if not BESIDE.match(PurePosixPath(file).name)]
    return sorted(file for file in own if not (part := _PART.fullmatch(file)) or int(part[2]) == 1)


def parts(file: str) -> list[str]:
    """Return the files of a model: one, or all parts of a split one."""
    if not (found := _PART.fullmatch(file)):
        return [file]
    return [f"{found[1]}-{i:05}-of-{found[3]}{SUFFIX}" for i in range(1, int(found[3]) + 1)]


def tagged(files: Collection[str], tag: str | None) -> str | None:
    """Return the model with a tag (ignoring case) or path; without a tag, the default."""
    if tag in files:
        return tag
    known = models(files)
    for wanted in DEFAULTS if tag is None else (tag,):
        named = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}[-./]", re.IGNORECASE)
        if found := [file for file in known if named.search(file)]:
            return found[0]
    return known[0] if known and tag is None else None


def tags(files: Iterable[str]) -> Sequence[str]:
    """Return the tags of the models among some files: the last word of their names."""
    bare = (parts(file)[0].removesuffix(SUFFIX) for file in models(files))
    words = (_TAG.search(re.sub(r"-\d{5}-of-\d{5}$", "", name)) for name in bare)
    return list(dict.fromkeys(word[1] for word in words if word))
