"""A small model whose head partly agrees with it, and prompts for it."""

import json
from pathlib import Path

import pytest

PROMPTS = {
    "code": ("deffx", "importos", "classA"),
    "edit": ("abcabcabcabc", "xyzxyz"),
    "prose": ("thelicence",),
}


@pytest.fixture(scope="session")
def agreeing(folder: Path) -> Path:
    return folder


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write six prompts of three categories."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"prompt": text, "category": category, "name": f"{category} {number}"}
        for category, texts in PROMPTS.items()
        for number, text in enumerate(texts)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
