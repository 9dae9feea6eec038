"""Requests that concern every replica: they are sent to all of them, and the answers become one."""

import asyncio
import json
from typing import Any, NamedTuple

from aiohttp import web
from multidict import CIMultiDict

from specdec.ray.upstream import Late, Lost, Sent, TooLong, Unreached
from specdec.route.replicas import Replica
from specdec.route.state import SOON, State
from specdec.server.failures import Failure


class Told(NamedTuple):
    """What one replica has answered."""

    status: int
    headers: CIMultiDict[str]
    body: bytes

    @property
    def response(self) -> web.Response:
        return web.Response(status=self.status, headers=self.headers, body=self.body)


async def merged_models(state: State, sent: Sent) -> web.Response:
    """List the models of all replicas; of a name that several have, what the first says."""
    told = await _ask_all(state, sent)
    cards: dict[str, Any] = {}
    for own in told:
        for card in _cards(own):
            cards.setdefault(card["id"], card)
    if not cards:
        return told[0].response
    data = list(cards.values())
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return web.json_response({"object": "list", "data": data, **ends})


def _cards(told: Told) -> list[dict[str, Any]]:
    if told.status != 200:
        return []
    try:
        found = json.loads(told.body)["data"]
        return [own for own in found if isinstance(own["id"], str)]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []


async def flush_all(state: State, sent: Sent) -> web.Response:
    """Flush all replicas; the first failure is the response."""
    told = await _ask_all(state, sent)
    return next((own for own in told if own.status != 200), told[0]).response


async def _ask_all(state: State, sent: Sent) -> list[Told]:
    """Ask all replicas that are up; those that are gone meanwhile say nothing."""
    up = [own for own in state.fleet.replicas if own.is_up]
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(_ask(state, own, sent)) for own in up]
    told = [found for own in asked if (found := own.result())]
    if not told:
        raise Failure(503, "No replica is up; try again later.", code="no_replica", headers=SOON)
    return told


async def _ask(state: State, replica: Replica, sent: Sent) -> Told | None:
    try:
        async with state.upstream.ask(replica.url, sent) as answer:
            return Told(answer.status, answer.headers, await answer.whole())
    except (Unreached, Lost, Late, TooLong):
        replica.wake.set()
        return None
