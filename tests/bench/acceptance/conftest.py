"""A small model whose head agrees with it in part, and prompts for it."""

import json
from pathlib import Path

import pytest

from tests.models.agreeing import write_agreeing

PROMPTS = {
    "code": ("deffx", "importos", "classA"),
    "edit": ("abcabcabcabc", "xyzxyz"),
    "prose": ("thelicence",),
}


@pytest.fixture(scope="session")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agreeing")
    write_agreeing(folder, "qwen3_5")
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
