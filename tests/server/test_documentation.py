"""The examples of docs/serving.md and docs/api.md work beside `make serve`; that on agents beside its own."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.server.settings import ServerConfig
from tests.server.live import Answer, Live, serving

ROOT = Path(__file__).parents[2]
PAGES = ("serving", "api")
DEFAULT = ServerConfig()
ADDRESS = f"http://{DEFAULT.host}:{DEFAULT.port}"


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{page}-{number}")
        for page in PAGES
        for number, block in enumerate(
            re.findall(
                rf"^```{language}\n(.*?)^```", (ROOT / f"docs/{page}.md").read_text("utf-8"), re.M | re.S
            )
        )
    ]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    recipe = re.search(
        r"^serve:.*\n\t@\$\(bin\)/specdec serve tiny \$\(SERVE\)$", (ROOT / "Makefile").read_text(), re.M
    )
    assert recipe, "make serve has other options than this server"
    yield from serving()


def at(live: Live, block: str) -> str:
    """Return a block with this server's address in place of the default one."""
    assert block.count(ADDRESS) == 1
    return block.replace(ADDRESS, live.url)


@pytest.mark.parametrize("block", blocks("bash"))
def test_a_curl_command_works_as_pasted(live: Live, block: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["bash", "-ec", at(live, block)]
    said = subprocess.run(command, capture_output=True, check=True, timeout=120).stdout
    answer = Answer(200, {}, said)
    events = answer.events if said.startswith(b"data: ") else [answer.json]
    assert all(choice for event in events for choice in event["choices"])
    if "json_schema" in block:
        assert {*json.loads(events[0]["choices"][0]["message"]["content"])} == {"x"}


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_works_as_pasted(live: Live, block: str) -> None:
    run = [sys.executable, "-c", at(live, block)]
    assert subprocess.run(run, capture_output=True, check=True, timeout=120).stdout.strip()


def test_both_official_clients_get_the_forced_calls_of_the_page() -> None:
    page = (ROOT / "docs/clients.md").read_text("utf-8").partition("## Coding agents\n")[2]
    options = re.search(r"`specdec serve tiny (--tool-call-parser \w+)`", page)
    block = re.search(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert options and block and block[1].count(ADDRESS) == 2
    with Live(*options[1].split()) as live:
        run = [sys.executable, "-c", block[1].replace(ADDRESS, live.url)]
        said = subprocess.run(run, capture_output=True, check=True, timeout=120, text=True).stdout
    ours, theirs = said.splitlines()  # unseeded, so each may make several calls
    assert "name='read_file'" in ours and "name='read_file'" in theirs and "ToolUseBlock(" in theirs


def test_the_page_begins_with_both() -> None:
    page = (ROOT / "docs/serving.md").read_text("utf-8")
    shown = re.findall(r"^```(\w*)\n.*?^```\n", page, re.M | re.S)[:3]
    assert shown == ["", "bash", "python"] and "from openai import OpenAI" in page
