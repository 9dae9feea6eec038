"""Engines here open by the hundred: they share the plain texts, and the process that has xgrammar loaded."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.lossless.cases import Case, plain_cases


@pytest.fixture(scope="module", autouse=True)
def _shared(shared_grammar_process: None) -> None:
    pass


@pytest.fixture(scope="session")
def known(family_folder: Callable[..., Path]) -> Callable[[str], tuple[Path, list[Case]]]:
    """Return a function that finds a family's folder and what plain decoding says to every request there."""

    @cache
    def find(family: str) -> tuple[Path, list[Case]]:
        folder = family_folder(family)
        return folder, plain_cases(folder)

    return find
