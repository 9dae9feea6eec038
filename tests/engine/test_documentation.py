"""The Python examples in docs/python.md, docs/drafters.md and the README run unchanged."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("docs/python.md", "docs/drafters.md", "README.md")
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text("utf-8"), re.M | re.S)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_as_it_stands(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "pasted.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_every_section_of_code_is_found() -> None:
    assert len(BLOCKS) >= 5
