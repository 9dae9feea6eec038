"""Many engines are opened here: they share the process with xgrammar loaded."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _shared(shared_grammar_process: None) -> None:
    pass
