"""Engines here open by the hundred; they share the process that has xgrammar loaded."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _shared(shared_grammar_process: None) -> None:
    pass
