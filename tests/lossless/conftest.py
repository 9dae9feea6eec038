"""Hundreds of engines are opened here: they share plain outputs and the grammar process."""

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
    """Return a function from a family to its folder and the plain decoding outputs of all requests."""

    @cache
    def find(family: str) -> tuple[Path, list[Case]]:
        folder = family_folder(family)
        return folder, plain_cases(folder)

    return find
