"""Many concurrent clients, some of them bad: the others get their usual answers, and nothing is left."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import pytest

from tests.selection import EXHAUSTIVE
from tests.server import load
from tests.server.live import Live
from tests.server.load import SHARES, Job, Said, alone, besiege

COUNT, AT_ONCE, ROUNDS = 50, 12, 2
GROWS_MB = 32.0


async def spoilt(session: aiohttp.ClientSession, jobs: Sequence[Job]) -> Mapping[Job, Said]:
    """Return the answers alone, with one falsified, which must be detected."""
    found = await alone(session, jobs)
    return found | {next(iter(found)): ("", [])}


@EXHAUSTIVE
def test_valid_requests_get_the_same_answers_as_alone(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "alone", spoilt)
    options = ("--dtype", "float64", "--draft", "suffix", "--max-running", "32", "--stall-timeout", "1")
    with Live(*options, model=str(hybrid)) as live:
        reports, left = asyncio.run(
            besiege(live, count=COUNT, at_once=AT_ONCE, rounds=ROUNDS, seed=1, most_tokens=40)
        )
        code, log = live.stop()
    assert code == 0 and "ERROR" not in log and "Traceback" not in log
    for report in reports:
        (noticed,) = report.wrong
        assert "another text than alone" in noticed
        assert report.ended.total() == COUNT
        assert report.ended["deaf: given up"] == 1 and report.ended["leaves: left"] > 0
        assert (
            sum(v for k, v in report.ended.items() if "malformed: refused" in k)
            == COUNT * SHARES["malformed"]
        )
    assert not any(own.wrong for own in left)
    _, first, second = left
    assert second.rss_mb < first.rss_mb + GROWS_MB
