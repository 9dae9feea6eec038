"""Servers that die or pause at any time: no wrong text, nothing held, and intact memory on both sides."""

import asyncio
from pathlib import Path

from specdec.bench.random_model import write_random_checkpoint
from tests.selection import EXHAUSTIVE
from tests.server.reach.faults import Siege, draw, sides
from tests.server.reach.forgery import SMALL, VOCAB
from tests.server.reach.pairs import has_nixl

REQUESTS = 40
"""`python -m tests.server.reach.faults` sends 200, to a larger model and with more faults."""

pytestmark = [has_nixl, EXHAUSTIVE]


def test_servers_that_are_killed_or_stopped_cost_time_alone(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, SMALL, seed=0)
    with sides(str(tmp_path), {"UCX_TLS": "tcp,self"}) as (prefill, decode):
        faults = [("stop", prefill), ("kill", prefill), ("stop", decode), ("kill", decode)]
        siege = Siege(prefill, decode, draw(8, range(66, 400), VOCAB, 0), 0)
        report = asyncio.run(siege.run(REQUESTS, 4, faults))
        said = prefill.said() + decode.said()
    assert report.wrong == []
    assert report.left == {}
    assert report.faults.total() == len(faults)
    assert report.fetches["fetched"] > 0
    assert "Traceback" not in said and "CRITICAL" not in said
