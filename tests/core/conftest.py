"""Many engines are opened here: they share the grammar process."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _shared(shared_grammar_process: None) -> None:
    pass
