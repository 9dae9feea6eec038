"""The documented settings, aliases and capabilities match the code."""

from pathlib import Path

import pytest

from tests.doc_tables import TABLES, shown, tables


@pytest.mark.parametrize(("path", "marker", "table"), [pytest.param(*own, id=own[1]) for own in tables()])
def test_the_documentation_shows_the_table(path: Path, marker: str, table: str) -> None:
    assert shown(path.read_text("utf-8"), marker) == table, "run python -m tests.doc_tables"


def test_every_setting_is_described() -> None:
    for settings in TABLES:
        assert all(field.title and field.description for field in settings.model_fields.values())
